"""Every encoder declares its modality and accepts its own example."""

import jax
import jax.numpy as jnp
import pytest

from ssl_jax import models


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


def test_the_modality_cannot_be_set_by_a_config():
  with pytest.raises(ValueError, match=r"^model\.modality = 'sentences' is not a parameter of 'resnet_tiny'"):
    models.create('resnet_tiny', modality='sentences')
