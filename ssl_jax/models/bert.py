"""BERT (Devlin et al. 2019) as a sentence encoder. The dropout of a sentence depends only on its own key."""

import functools
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax.arrays import to_float32
from ssl_jax.models.embedding import Embed
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.transformer import LayerNorm, attend, require_sizes, require_text
from ssl_jax.registry import require, require_choice

KEY_WORDS = 2  # length of the dropout key, in uint32 words; the key follows the tokens of a sentence
PAD = 0  # padding token

_NORMAL = nn.initializers.normal(0.02)
_Norm = functools.partial(LayerNorm, epsilon=1e-12)


def view(key: jax.Array, tokens: jax.Array) -> jax.Array:
  """A view of one sentence: its tokens and a dropout key.  [T] -> uint32 [T + 2]"""
  return jnp.concatenate([tokens.astype(jnp.uint32), jax.random.bits(key, (KEY_WORDS,), jnp.uint32)])


def without_dropout(tokens: jax.Array) -> jax.Array:
  """The input for evaluations, which use no dropout: the key is zero.  [T] -> uint32 [T + 2]"""
  return jnp.concatenate([tokens.astype(jnp.uint32), jnp.zeros(KEY_WORDS, jnp.uint32)])


def drop(keys: jax.Array | None, place: int, rate: float, x: jax.Array) -> jax.Array:
  """Dropout with one key per example, so that masks depend neither on the batch nor on the device.

  Args:
    keys: [N]; None disables dropout.
    place: number of the mask, because a key is used for several masks.
    rate: probability of dropping an entry.
    x: [N, ...]
  """
  if keys is None or not rate:
    return x
  mask = lambda key: jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape[1:])
  return jnp.where(jax.vmap(mask)(keys), x / (1 - rate), jnp.zeros_like(x))


class Layer(nn.Module):
  """norm(x + attention(x)), then norm(x + mlp(x)).  [N, T, D], real [N, T], keys [N] or None -> [N, T, D]"""

  heads: int
  hidden: int
  dropout: float
  first_place: int  # number of the first of three dropout masks
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array, real: jax.Array, keys: jax.Array | None) -> jax.Array:
    n, t, d = x.shape
    dense = lambda features, name: nn.Dense(features, kernel_init=_NORMAL, dtype=self.dtype, name=name)
    per_head = lambda name: dense(d, name)(x).reshape(n, t, self.heads, d // self.heads)
    drop_weights = functools.partial(drop, keys, self.first_place, self.dropout)
    attended = attend(per_head('query'), per_head('key'), per_head('value'), real, drop_weights)
    x = _Norm(name='norm1')(x + drop(keys, self.first_place + 1, self.dropout, dense(d, 'attended')(attended)))
    y = dense(d, 'fc2')(nn.gelu(dense(self.hidden, 'fc1')(x), approximate=False))
    return _Norm(name='norm2')(x + drop(keys, self.first_place + 2, self.dropout, y))


class SentenceEncoder(Encoder):
  """An encoder of sentences: tokens, followed by the two words of a dropout key."""

  modality: ClassVar[str] = 'sentences'

  @nn.nowrap
  def example(self, size: int) -> jax.Array:
    """Two all-zero sentences of `size` tokens."""
    return jnp.zeros((2, size + KEY_WORDS), jnp.uint32)


class BERT(SentenceEncoder):
  """Sentences, uint32 [N, T + 2] -> features [N, width] in float32.

  A sentence consists of its tokens, padded with `PAD`, and the two words of its dropout key. Two views of a sentence
  are the same tokens with different keys (Gao et al. 2021). The features are those of the first token after the last
  layer (`pooling='cls'`), or the mean over the tokens that are not padding ('mean'). BERT's pooler is a separate head.
  `remat` recomputes each layer in the backward pass instead of storing its activations.
  """

  width: int
  depth: int
  heads: int
  vocabulary: int = 30522
  positions: int = 512
  dropout: float = 0.1
  pooling: str = 'cls'
  remat: bool = False
  dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    require_sizes(self.width, self.depth, self.heads)
    require_choice('pooling', self.pooling, ('cls', 'mean'))
    require('dropout', self.dropout, lambda x: 0 <= x < 1, 'in [0, 1)')
    require_text(self.vocabulary, self.positions)
    super().__post_init__()

  @nn.nowrap
  def torch_name(self, name: str) -> str:
    """Removes the prefix 'bert.' of older files, and renames gamma and beta of layer norm to weight and bias."""
    name = name.removeprefix('bert.').replace('LayerNorm.gamma', 'LayerNorm.weight')
    return name.replace('LayerNorm.beta', 'LayerNorm.bias')

  @nn.compact
  def __call__(self, sentences: jax.Array, train: bool) -> jax.Array:
    chex.assert_rank(sentences, 2)
    tokens, key_words = jnp.split(sentences, [sentences.shape[1] - KEY_WORDS], axis=1)
    length = tokens.shape[1]
    require('data.tokens', length, lambda x: x <= self.positions, f'at most model.positions = {self.positions}')
    keys = jax.vmap(lambda words: jax.random.wrap_key_data(words, impl='threefry2x32'))(key_words) if train else None
    real = tokens != PAD
    embed = lambda number, name: Embed(number, self.width, embedding_init=_NORMAL, dtype=self.dtype, name=name)
    x = embed(self.vocabulary, 'words')(tokens)
    x = x + embed(self.positions, 'positions')(jnp.arange(length))[None]
    x = x + embed(2, 'kinds')(jnp.zeros((1, 1), jnp.int32))  # inputs are single sentences, so every token has type 0
    x = drop(keys, 0, self.dropout, _Norm(name='norm0')(x))
    layer = nn.remat(Layer) if self.remat else Layer
    for i in range(self.depth):
      x = layer(self.heads, 4 * self.width, self.dropout, 1 + 3 * i, self.dtype, name=f'layer_{i}')(x, real, keys)
    if self.pooling == 'cls':
      return to_float32(x[:, 0])
    weights = real[:, :, None].astype(to_float32(x).dtype)
    return (to_float32(x) * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
