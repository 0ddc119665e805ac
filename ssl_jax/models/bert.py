"""BERT (Devlin et al. 2019) as an encoder of sentences, with dropout that follows from each sentence's own key."""

import functools

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from ssl_jax.models.norm import wide
from ssl_jax.models.vit import LayerNorm, attend

KEY_WORDS = 2  # of the key that stands behind a sentence's tokens, uint32
PAD = 0  # the token that fills a sentence up

_NORMAL = nn.initializers.normal(0.02)
_Norm = functools.partial(LayerNorm, epsilon=1e-12)


def view(key: jax.Array, tokens: jax.Array) -> jax.Array:
  """A view of one sentence: its tokens, and the key that its dropout follows from.  [T] -> uint32 [T + 2]"""
  return jnp.concatenate([tokens.astype(jnp.uint32), jax.random.bits(key, (KEY_WORDS,), jnp.uint32)])


def seen(tokens: jax.Array) -> jax.Array:
  """What evaluations show the encoder: a sentence without dropout.  [T] -> uint32 [T + 2]"""
  return jnp.concatenate([tokens.astype(jnp.uint32), jnp.zeros(KEY_WORDS, jnp.uint32)])


def drop(keys: jax.Array | None, place: int, rate: float, x: jax.Array) -> jax.Array:
  """Dropout of each example by its own key, so that no mask depends on the batch or the device; [N], [N, ...]"""
  if keys is None or not rate:
    return x
  mask = lambda key: jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape[1:])
  return jnp.where(jax.vmap(mask)(keys), x / (1 - rate), jnp.zeros_like(x))


class Layer(nn.Module):
  """norm(x + attention(x)), then norm(x + mlp(x)); [N, T, D], real [N, T], keys [N] or None -> [N, T, D]"""

  heads: int
  hidden: int
  dropout: float
  first_place: int  # of its three masks
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, real, keys):
    n, t, d = x.shape
    dense = lambda features, name: nn.Dense(features, kernel_init=_NORMAL, dtype=self.dtype, name=name)
    parted = lambda name: dense(d, name)(x).reshape(n, t, self.heads, d // self.heads)
    thin_out = functools.partial(drop, keys, self.first_place, self.dropout)
    attended = attend(parted('query'), parted('key'), parted('value'), real, thin_out)
    x = _Norm(name='norm1')(x + drop(keys, self.first_place + 1, self.dropout, dense(d, 'attended')(attended)))
    y = dense(d, 'fc2')(nn.gelu(dense(self.hidden, 'fc1')(x), approximate=False))
    return _Norm(name='norm2')(x + drop(keys, self.first_place + 2, self.dropout, y))


class BERT(nn.Module):
  """Sentences, uint32 [N, T + 2] -> features [N, width] in float32.

  A sentence is its tokens, filled up with `PAD`, and the two words of the key that its dropout follows from in
  training: two views of a sentence are the same tokens with two keys (Gao et al. 2021). Features are those of the
  first token ('cls') or the mean over the real ones ('mean'), after the last layer and before BERT's own pooler, which
  is a head here. `remat` computes each layer again in the backward pass instead of keeping it.
  """

  width: int
  depth: int
  heads: int
  vocabulary: int = 30522
  positions: int = 512
  dropout: float = 0.1
  pooling: str = 'cls'
  remat: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, sentences, train: bool):
    chex.assert_rank(sentences, 2)
    tokens, key_words = jnp.split(sentences, [sentences.shape[1] - KEY_WORDS], axis=1)
    length = tokens.shape[1]
    if self.pooling not in ('cls', 'mean'):
      raise ValueError(f"model.pooling = {self.pooling!r} does not exist: give 'cls' or 'mean'")
    if not 0 <= self.dropout < 1:
      raise ValueError(f'model.dropout = {self.dropout!r} must be in [0, 1), such as 0.1')
    if self.width % self.heads:
      raise ValueError(f'model.heads = {self.heads} does not divide model.width = {self.width}: give one that does')
    if self.depth < 1:
      raise ValueError(f'model.depth = {self.depth} must be at least 1')
    if self.vocabulary < 1:
      raise ValueError(f'model.vocabulary = {self.vocabulary} must be at least 1: give that of data.vocabulary')
    if length > self.positions:
      raise ValueError(f'data.tokens = {length} is more than the {self.positions} of model.positions: lower it')
    keys = jax.vmap(lambda words: jax.random.wrap_key_data(words, impl='threefry2x32'))(key_words) if train else None
    real = tokens != PAD
    embed = lambda number, name: nn.Embed(number, self.width, embedding_init=_NORMAL, dtype=self.dtype, name=name)
    x = embed(self.vocabulary, 'words')(tokens)
    x = x + embed(self.positions, 'positions')(jnp.arange(length))[None]
    x = x + embed(2, 'kinds')(jnp.zeros((1, 1), jnp.int32))  # the first sentence of a pair, which has no second
    x = drop(keys, 0, self.dropout, _Norm(name='norm0')(x))
    layer = nn.remat(Layer) if self.remat else Layer
    for i in range(self.depth):
      x = layer(self.heads, 4 * self.width, self.dropout, 1 + 3 * i, self.dtype, name=f'layer_{i}')(x, real, keys)
    if self.pooling == 'cls':
      return wide(x[:, 0])
    weights = real[:, :, None].astype(wide(x).dtype)
    return (wide(x) * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
