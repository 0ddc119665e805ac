"""The text transformer of CLIP matches torch's layers and OpenAI's names, is causal, and ignores padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from ssl_jax import models
from ssl_jax.models import torch_weights
from ssl_jax.reporting import torch_code
from tests.models.test_bert import batch

KEY = jax.random.key(0, impl='rbg')
SMALL = dict(width=24, depth=2, heads=3, vocabulary=50, positions=12)


def small(**changes):
  return models.create('clip_text_tiny', **(SMALL | changes))


@functools.cache
def init(module):
  """Random variables, including biases and scales."""
  variables = jax.jit(lambda x: module.init(KEY, x, train=False))(batch())
  leaves, tree = jax.tree.flatten(variables)
  rng = np.random.default_rng(1)
  return tree.unflatten([x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


class Torch(torch.nn.Module):
  """CLIP's text transformer from torch's own layers, with the names of OpenAI's state dict."""

  def __init__(self, width, depth, heads, vocabulary, positions, activation):
    super().__init__()
    self.token_embedding = torch.nn.Embedding(vocabulary, width)
    self.positional_embedding = torch.nn.Parameter(torch.zeros(positions, width))
    self.transformer = torch.nn.Module()
    self.transformer.resblocks = torch.nn.ModuleList()
    for _ in range(depth):
      block = torch.nn.Module()
      block.attn = torch.nn.MultiheadAttention(width, heads, batch_first=True)
      block.ln_1, block.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
      block.mlp = torch.nn.Module()
      block.mlp.c_fc, block.mlp.c_proj = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
      self.transformer.resblocks.append(block)
    self.ln_final = torch.nn.LayerNorm(width)
    self.activation = {'gelu': torch.nn.functional.gelu, 'quick_gelu': lambda x: x * torch.sigmoid(1.702 * x)}[
      activation
    ]

  def forward(self, tokens):
    length = tokens.shape[1]
    x = self.token_embedding(tokens) + self.positional_embedding[:length]
    mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
    for block in self.transformer.resblocks:
      y = block.ln_1(x)
      x = x + block.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
      x = x + block.mlp.c_proj(self.activation(block.mlp.c_fc(block.ln_2(x))))
    last = (tokens != 0).cumsum(1).argmax(1)
    return self.ln_final(x)[torch.arange(len(x)), last]


@pytest.mark.parametrize('activation', ['gelu', 'quick_gelu'])
def test_outputs_and_gradients_match_torch(activation):
  with jax.enable_x64(True):
    module = small(activation=activation, dtype=jnp.float64)
    x = batch()
    variables = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), init(module))
    direction = jnp.asarray(np.random.default_rng(2).normal(size=(5, 24)))
    loss = lambda v: (module.apply(v, x, train=True) * direction).sum()
    value, gradients = jax.jit(jax.value_and_grad(loss))(variables)
    gradients = torch_weights.to_torch(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
    network = Torch(**SMALL, activation=activation).double()
    network.load_state_dict({k: torch.tensor(v).double() for k, v in torch_weights.to_torch(variables).items()})
    theirs = (network(torch.tensor(np.asarray(x[:, :-2], np.int64))) * torch.tensor(np.asarray(direction))).sum()
    theirs.backward()
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    assert gradients.keys() == dict(network.named_parameters()).keys()
    for name, tensor in network.named_parameters():
      np.testing.assert_allclose(gradients[name], tensor.grad.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_the_torch_code_of_an_export_gives_the_same_features():
  for activation in ('gelu', 'quick_gelu'):
    module, names = small(activation=activation), {}
    variables = init(module)
    exec(torch_code.source(module, 9), names)
    tensors = {name: torch.tensor(tensor) for name, tensor in torch_weights.to_torch(variables).items()}
    names['encoder'].load_state_dict(tensors, strict=True)
    found = names['encoder'].eval()(torch.tensor(np.asarray(batch()[:, :-2], np.int64))).detach().numpy()
    expected = jax.jit(functools.partial(module.apply, train=False))(variables, batch())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_size_is_that_of_clip():
  """The text tower of OpenAI's ResNet-50 and ViT-B models has 63,165,952 parameters before its projection."""
  module = models.create('clip_text')
  variables = jax.eval_shape(lambda: module.init(KEY, module.example(77), train=False))
  assert sum(p.size for p in jax.tree.leaves(variables)) == 49408 * 512 + 77 * 512 + 12 * 3_152_384 + 2 * 512


def test_initialization_is_that_of_clip():
  """Of a width of 128 and a depth of 2. Biases are 0."""
  params = jax.jit(lambda x: small(width=128, heads=2).init(KEY, x, train=False))(batch())['params']
  block = params['resblocks_0']
  found = {name: block[name]['kernel'].std() for name in ('qkv', 'proj', 'c_fc', 'c_proj')}
  found |= {name: params[f'{name}_embedding']['embedding'].std() for name in ('token', 'positional')}
  expected = dict(qkv=128**-0.5, proj=512**-0.5, c_fc=256**-0.5, c_proj=512**-0.5, token=0.02, positional=0.01)
  assert found == {name: pytest.approx(std, rel=0.05) for name, std in expected.items()}


def test_padding_and_what_comes_after_the_last_token_change_nothing():
  module, x = small(), batch()
  variables = init(module)
  apply = jax.jit(lambda x: module.apply(variables, x, train=False))
  longer = jnp.concatenate([x[:, :9], jnp.zeros((5, 3), jnp.uint32), x[:, 9:]], axis=1)
  np.testing.assert_allclose(apply(longer), apply(x), atol=1e-5)
  np.testing.assert_array_equal(apply(x.at[:, -2:].add(jnp.uint32(1))), apply(x))  # there is no dropout


def test_weights_of_openai_are_loaded(tmp_path):
  variables = init(small())
  tensors = torch_weights.to_torch(variables)
  assert {'positional_embedding', 'transformer.resblocks.1.attn.in_proj_weight', 'ln_final.bias'} <= tensors.keys()
  safetensors.numpy.save_file(tensors, tmp_path / 'text.safetensors')
  found = torch_weights.load(tmp_path / 'text.safetensors', small(), 9)
  jax.tree.map(np.testing.assert_array_equal, found, variables)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(activation='relu'), r"model\.activation = 'relu' is not a valid choice: did you mean 'gelu'"),
    (dict(heads=5), r'model\.heads = 5 must be a divisor of width = 24'),
    (dict(vocabulary=0), r'model\.vocabulary = 0 must be at least 1'),
    (dict(positions=8), r'data\.tokens = 9 must be at most positions = 8'),
  ],
)
def test_invalid_settings_are_rejected(changes, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: small(**changes).init(KEY, batch(), train=False))
