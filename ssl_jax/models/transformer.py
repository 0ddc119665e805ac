"""What the ViT, BERT and CLIP's text transformer share: layer norm, attention, and checks of their sizes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from ssl_jax.arrays import to_float32
from ssl_jax.registry import require


def require_sizes(width: int, depth: int, heads: int) -> None:
  """Raises a ValueError unless depth and width are in range and the number of heads divides the width."""
  require('depth', depth, lambda x: 1 <= x <= 200, 'at least 1 and at most 200')
  require('width', width, lambda x: 1 <= x <= 2**20, f'at least 1 and at most {2**20}')
  require('heads', heads, lambda x: x >= 1 and width % x == 0, f'a divisor of width = {width}')


def require_text(vocabulary: int, positions: int) -> None:
  """Raises a ValueError unless the sizes of the vocabulary and of the position embedding are in range."""
  require('vocabulary', vocabulary, lambda x: 1 <= x <= 2**31, 'at least 1: the size of data.vocabulary')
  require('positions', positions, lambda x: 1 <= x <= 2**31, 'at least 1: the longest sentence in tokens')


class LayerNorm(nn.Module):
  """Layer norm over the last axis with float32 statistics, in the dtype of its input.  [..., D] -> [..., D]"""

  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (1,) * (x.ndim - 1) + (-1,)
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:]).reshape(shape)
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:]).reshape(shape)
    centred = to_float32(x) - to_float32(x).mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  real: jax.Array | None = None,
  drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
  causal: bool = False,
) -> jax.Array:
  """softmax(query · key / √D) · value per head, with the softmax in float32.

  Args:
    query, key, value: [N, T, H, D]
    real: which keys may be attended to, bool [N, T]; None: all.
    drop: dropout of the attention weights.
    causal: whether a query attends only to itself and to the keys before it.

  Returns:
    [N, T, H·D]
  """
  similarity = jnp.einsum('nqhd,nkhd->nhqk', query, key, preferred_element_type=to_float32(query).dtype)
  similarity = similarity * query.shape[-1] ** -0.5
  if real is not None:
    similarity = jnp.where(real[:, None, None, :], similarity, jnp.finfo(similarity.dtype).min)
  if causal:
    earlier = jnp.tril(jnp.ones(similarity.shape[2:], bool))
    similarity = jnp.where(earlier[None, None], similarity, jnp.finfo(similarity.dtype).min)
  attended = jnp.einsum('nhqk,nkhd->nqhd', drop(nn.softmax(similarity)).astype(value.dtype), value)
  return attended.reshape(*query.shape[:2], -1)
