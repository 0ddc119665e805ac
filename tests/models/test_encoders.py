"""Every encoder declares its modality and accepts its own example."""

import jax
import jax.numpy as jnp
import pytest

from ssl_jax import models
from ssl_jax.models import heads


@pytest.mark.parametrize(
  ('name', 'modality'),
  [
    *((name, 'images') for name in ('resnet_tiny', 'alexnet_small', 'vit_tiny32')),
    *((name, 'sentences') for name in ('bert_tiny', 'clip_text_tiny')),
  ],
)
def test_an_encoder_accepts_its_example(name, modality):
  encoder = models.create(name)
  inputs = encoder.example(32)
  features, _ = jax.eval_shape(lambda: encoder.init_with_output(jax.random.key(0), inputs, train=False))
  assert encoder.modality == modality
  assert features.shape[0] == 2 and features.dtype == jnp.float32


# Width, depth and heads of the papers, and of the small BERTs of Turc et al. (2019). The number of heads does not show
# in the number of parameters.
@pytest.mark.parametrize(
  ('name', 'sizes'),
  [
    ('vit_s16', (384, 12, 12)),  # MoCo v3 has 12 heads here, not 6
    ('vit_b16', (768, 12, 12)),
    ('vit_tiny32', (192, 12, 3)),
    ('bert_base', (768, 12, 12)),
    ('bert_small', (512, 4, 8)),
    ('bert_tiny', (128, 2, 2)),
    ('clip_text', (512, 12, 8)),
  ],
)
def test_transformers_have_the_sizes_of_the_papers(name, sizes):
  encoder = models.create(name)
  assert (encoder.width, encoder.depth, encoder.heads) == sizes
  if isinstance(encoder, models.BERT):
    assert (encoder.dropout, encoder.pooling) == (0.1, 'cls')
  if isinstance(encoder, models.CLIPText):
    assert encoder.activation == 'gelu'


@pytest.mark.parametrize(
  'module',
  [
    *(models.create(name, axis_name='batch') for name in ('resnet18', 'resnet50_cifar', 'alexnet_small')),
    *(heads.create(name, axis_name='batch') for name in ('simclr', 'simsiam', 'byol')),
    heads.create('dino', axis_name='batch', batch_norm='hidden'),
  ],
)
def test_every_batch_norm_is_over_the_global_batch(module):
  x = jax.ShapeDtypeStruct((2, 32, 32, 3) if isinstance(module, models.Encoder) else (2, 64), jnp.float32)
  variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=True), x)
  apply = lambda variables, x: module.apply(variables, x, train=True, mutable=['batch_stats'])
  program = str(jax.make_jaxpr(apply, axis_env=[('batch', 2)])(variables, x))
  norms = len(jax.tree.leaves(variables['batch_stats'])) // 2
  assert program.count('psum') == 2 * norms > 0  # one for each mean of a norm


def test_the_modality_cannot_be_set_by_a_config():
  with pytest.raises(ValueError, match=r"^model\.modality = 'sentences' is not a parameter of 'resnet_tiny'"):
    models.create('resnet_tiny', modality='sentences')
