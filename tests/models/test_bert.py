"""BERT matches torch's encoder layers and the names of transformers; dropout depends only on a sentence's key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from ssl_jax import models
from ssl_jax.models import bert, torch_weights

pytestmark = pytest.mark.slow  # it compiles transformers

KEY = jax.random.key(0, impl='rbg')
SMALL = dict(width=24, depth=2, heads=3, vocabulary=50, positions=12)


def small(**changes):
  return models.create('bert_tiny', **(SMALL | changes))


def batch(seed=0, count=5, length=9, key=True):
  """Sentences of different lengths, padded with 0, each with a key."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, 50, (count, length))
  tokens[np.arange(length)[None, :] >= rng.integers(3, length + 1, (count, 1))] = 0
  words = rng.integers(2**32, size=(count, 2)) if key else np.zeros((count, 2))
  return jnp.asarray(np.concatenate([tokens, words], axis=1), jnp.uint32)


def init(module, x=None):
  """Random variables, including biases and scales."""
  variables = jax.jit(lambda x: module.init(KEY, x, train=False))(batch() if x is None else x)
  leaves, tree = jax.tree.flatten(variables)
  rng = np.random.default_rng(1)
  return tree.unflatten([x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


class Torch(torch.nn.Module):
  """The same network from torch's own layers."""

  def __init__(self, tensors, width, depth, heads, pooling):
    super().__init__()
    parameter = lambda name: torch.nn.Parameter(torch.tensor(tensors[name], dtype=torch.float64))
    self.tensors = torch.nn.ParameterDict({name.replace('.', '/'): parameter(name) for name in tensors})
    settings = dict(dropout=0.0, activation='gelu', layer_norm_eps=1e-12, batch_first=True, dtype=torch.float64)
    self.layers = [torch.nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(depth)]
    self.width, self.pooling = width, pooling

  def forward(self, tokens):
    get = lambda name: self.tensors[name.replace('.', '/')]
    x = get('embeddings.word_embeddings.weight')[tokens]
    x = x + get('embeddings.position_embeddings.weight')[: tokens.shape[1]]
    x = x + get('embeddings.token_type_embeddings.weight')[0]
    norm = [get(f'embeddings.LayerNorm.{part}') for part in ('weight', 'bias')]
    x = torch.nn.functional.layer_norm(x, (self.width,), *norm, eps=1e-12)
    for i, layer in enumerate(self.layers):
      at = f'encoder.layer.{i}.'
      together = lambda leaf, at=at: torch.cat(
        [get(f'{at}attention.self.{n}.{leaf}') for n in ('query', 'key', 'value')]
      )
      parameters = {
        'self_attn.in_proj_weight': together('weight'),
        'self_attn.in_proj_bias': together('bias'),
        **{
          f'{ours}.{leaf}': get(f'{at}{theirs}.{leaf}')
          for leaf in ('weight', 'bias')
          for ours, theirs in {
            'self_attn.out_proj': 'attention.output.dense',
            'norm1': 'attention.output.LayerNorm',
            'linear1': 'intermediate.dense',
            'linear2': 'output.dense',
            'norm2': 'output.LayerNorm',
          }.items()
        },
      }
      x = torch.func.functional_call(layer, parameters, (x,), {'src_key_padding_mask': tokens == 0})
    if self.pooling == 'cls':
      return x[:, 0]
    real = (tokens != 0)[..., None].to(x.dtype)
    return (x * real).sum(1) / real.sum(1)


@pytest.mark.parametrize(('name', 'count', 'width'), [('bert_base', 108_891_648, 768), ('bert_tiny', 4_369_408, 128)])
def test_parameters_match_the_paper_without_the_pooler(name, count, width):
  module = models.create(name, axis_name='batch')
  features, variables = jax.eval_shape(lambda: module.init_with_output(KEY, module.example(32), train=True))
  assert features.shape == (2, width) and features.dtype == jnp.float32
  assert set(variables) == {'params'}
  assert sum(p.size for p in jax.tree.leaves(variables['params'])) == count


def test_initialization_matches_bert():
  """Matrices and embeddings have a standard deviation of 0.02; biases are 0, and scales 1."""
  params = jax.jit(lambda x: small(width=96, heads=3).init(KEY, x, train=False))(batch())['params']
  for path, x in jax.tree.leaves_with_path(params):
    name = jax.tree_util.keystr(path)
    if x.ndim == 2:
      assert abs(x.std() / 0.02 - 1) < (0.25 if x.size < 1000 else 0.1), name
    else:
      np.testing.assert_array_equal(x, 1.0 if 'scale' in name else 0.0, name)


@pytest.mark.parametrize('pooling', ['cls', 'mean'])
def test_outputs_and_gradients_match_torch(pooling):
  with jax.enable_x64(True):
    module = small(pooling=pooling, dtype=jnp.float64)
    x = batch()
    variables = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), init(module, x))
    direction = jnp.asarray(np.random.default_rng(2).normal(size=(5, 24)))
    loss = lambda v: (module.apply(v, x, train=False) * direction).sum()
    value, gradients = jax.jit(jax.value_and_grad(loss))(variables)
    ours = {
      name: np.asarray(g)
      for name, g in torch_weights.to_torch(jax.tree.map(lambda g: g.astype(jnp.float32), gradients)).items()
    }
    network = Torch(torch_weights.to_torch(variables), SMALL['width'], SMALL['depth'], SMALL['heads'], pooling)
    theirs = (network(torch.tensor(np.asarray(x[:, :-2], np.int64))) * torch.tensor(np.asarray(direction))).sum()
    theirs.backward()
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    assert ours.keys() == {name.replace('/', '.') for name in network.tensors}
    for name, tensor in network.tensors.items():
      np.testing.assert_allclose(ours[name.replace('/', '.')], tensor.grad.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


def test_padding_changes_nothing():
  """A sentence of nothing but padding has features of 0."""
  module = small(pooling='mean')
  short, variables = batch(length=9, key=False), init(module)
  longer = jnp.concatenate([short[:, :9], jnp.zeros((5, 3), jnp.uint32), short[:, 9:]], axis=1)
  apply = jax.jit(lambda x: module.apply(variables, x, train=False))
  np.testing.assert_allclose(apply(longer), apply(short), atol=1e-5)
  np.testing.assert_array_equal(apply(jnp.zeros_like(short)), 0)


def test_views_of_a_sentence_share_its_tokens_and_differ_in_their_key():
  tokens = np.array([2, 7, 9, 3, 0, 0], np.uint16)
  first, second = (np.asarray(bert.view(jax.random.key(k), tokens)) for k in (0, 1))
  np.testing.assert_array_equal(first[:6], tokens)
  np.testing.assert_array_equal(second[:6], tokens)
  assert (first[6:] != second[6:]).all()
  np.testing.assert_array_equal(bert.without_dropout(tokens), [*tokens, 0, 0])


def test_dropout_depends_only_on_the_key_of_a_sentence():
  module, x = small(dropout=0.3), batch()
  variables = init(module)
  train = jax.jit(lambda x: module.apply(variables, x, train=True))
  whole = train(x)
  np.testing.assert_allclose(train(x[::-1])[::-1], whole, atol=1e-5)  # whatever its place in the batch
  np.testing.assert_allclose(train(x[2:3]), whole[2:3], atol=1e-5)  # and whatever the rest of the batch
  other = train(x.at[0, -1].add(jnp.uint32(1)))
  assert np.abs(other[0] - whole[0]).max() > 0.05
  np.testing.assert_allclose(other[1:], whole[1:], atol=1e-5)
  seen = module.apply(variables, x, train=False)
  np.testing.assert_array_equal(seen, module.apply(variables, x.at[:, -2:].set(0), train=False))
  np.testing.assert_allclose(small(dropout=0.0).apply(variables, x, train=True), seen, atol=1e-5)


def test_dropout_is_that_of_bert(monkeypatch):
  """After the embeddings, and in each layer of the attention weights and after both parts: each with its own mask."""
  masks = []
  monkeypatch.setattr(bert, 'drop', lambda keys, place, rate, x: masks.append((place, rate, x.shape)) or x)
  x = batch()
  jax.eval_shape(lambda: small(dropout=0.3).init(KEY, x, train=True))
  hidden, attention = (5, 9, 24), (5, 3, 9, 9)
  shapes = [hidden, attention, hidden, hidden, attention, hidden, hidden]
  assert sorted(masks) == [(place, 0.3, shape) for place, shape in enumerate(shapes)]


def test_dropout_keeps_the_mean_and_masks_differ_between_places():
  keys, x = jax.random.split(jax.random.key(1), 40), jnp.ones((40, 500))
  first, second = (np.asarray(bert.drop(keys, place, 0.25, x)) for place in (0, 1))
  assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)}
  np.testing.assert_allclose((first == 0).mean(), 0.25, atol=0.02)
  np.testing.assert_allclose(((first == 0) & (second == 0)).mean(), 0.25**2, atol=0.02)  # independent
  np.testing.assert_array_equal(bert.drop(None, 0, 0.25, x), x)


def test_remat_gives_the_same_gradients():
  x, variables = batch(), init(small(depth=1))
  square = lambda module: lambda v: jnp.square(module.apply(v, x, train=True)).sum()
  gradient = lambda module: jax.jit(jax.grad(square(module)))(variables)
  for a, b in zip(*map(jax.tree.leaves, (gradient(small(depth=1, remat=True)), gradient(small(depth=1)))), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_close_to_float32():
  x, variables = batch(), init(small())
  narrow = small(dtype=jnp.bfloat16).apply(variables, x, train=False)
  assert narrow.dtype == jnp.float32
  np.testing.assert_allclose(narrow, small().apply(variables, x, train=False), atol=0.15)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(pooling='max'), r"model\.pooling = 'max' is not a valid choice: give one of cls, mean"),
    (dict(dropout=1.0), r'model\.dropout = 1\.0 must be in \[0, 1\)'),
    (dict(heads=5), r'model\.heads = 5 must be a divisor of width = 24'),
    (dict(vocabulary=0), r'model\.vocabulary = 0 must be at least 1'),
    (dict(positions=8), r'data\.tokens = 9 must be at most model\.positions = 8'),
  ],
)
def test_invalid_settings_are_rejected(changes, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: small(**changes).init(KEY, batch(), train=False))


@pytest.mark.parametrize('old', [False, True])
def test_weights_in_the_format_of_transformers_are_loaded(tmp_path, old):
  """Also with the names of older files and with the pretraining heads."""
  module, variables = small(), init(small())
  tensors = torch_weights.to_torch(variables)
  assert 'encoder.layer.1.attention.self.query.weight' in tensors
  if old:
    rename = lambda name: (
      'bert.' + name.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('Norm.bias', 'Norm.beta')
    )
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    tensors |= {
      'bert.pooler.dense.weight': np.ones((24, 24), np.float32),
      'cls.predictions.bias': np.ones(50, np.float32),
    }
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
  found = torch_weights.load(tmp_path / 'model.safetensors', module, 9)
  jax.tree.map(np.testing.assert_array_equal, found, variables)
