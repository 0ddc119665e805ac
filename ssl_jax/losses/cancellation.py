"""False negative cancellation (FNC, Huynh et al. 2022): treats negatives that look like positives separately."""

import chex
import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.arrays import to_float32
from ssl_jax.losses.reductions import masked
from ssl_jax.registry import is_whole, require
from ssl_jax.temperature import Temperature, scale


def false_negatives(scores: jax.Array, where: jax.Array, *, top: int, threshold: float) -> jax.Array:
  """Which negatives are considered false: those with one of the `top` highest scores, if it exceeds the threshold.

  `scores` `[Q, M]` is the similarity of a key to the query's image; `where` `[Q, M]` marks the keys that are negatives.
  Shapes: [Q, M], bool [Q, M] -> bool [Q, M]. No gradient.

  >>> false_negatives(jnp.array([[0.9, 0.8, 0.2]]), jnp.ones((1, 3), bool), top=1, threshold=0.7).tolist()
  [[True, False, False]]
  """
  chex.assert_equal_shape([scores, where])
  require('top', top, lambda n: is_whole(n) and n >= 1, 'a whole number of at least 1')
  require('threshold', threshold, lambda t: -1 <= t <= 1, 'a cosine, in [-1, 1]')
  scores = jnp.where(where, jax.lax.stop_gradient(to_float32(scores)), -jnp.inf)
  _, index = jax.lax.top_k(scores, min(top, scores.shape[1]))
  rows = jnp.arange(len(scores))[:, None]
  return jnp.zeros(scores.shape, bool).at[rows, index].set(True, unique_indices=True) & (scores > threshold)


def fnc(
  pos: jax.Array,
  neg: jax.Array,
  false: jax.Array,
  where: jax.Array,
  temperature: Temperature,
  *,
  attract: bool = True,
) -> jax.Array:
  """False negative attraction or elimination (Huynh et al. 2022, Eq. 4 and 3).

  With F the false negatives of a query, P its K positives and N its negatives,

    attract:   mean over P and F of -s/tau + log(sum over P and N of e^(s/tau)),
    otherwise: mean over P of -s/tau + log(sum over P and N without F of e^(s/tau)).

  All K positives are in the sum, as in the authors' code. Shapes: pos [Q, K]; neg, false, where [Q, M] -> [Q].

  >>> pos, neg, false = jnp.array([[0.9]]), jnp.array([[0.8, -0.2]]), jnp.array([[True, False]])
  >>> every = jnp.ones((1, 2), bool)
  >>> print(fnc(pos, neg, false, every, 0.5), fnc(pos, neg, false, every, 0.5, attract=False))
  [0.7573] [0.1051]
  """
  if isinstance(neg, pairs.NegativeBlocks):
    raise ValueError('neg comes in blocks, but false negatives are a whole matrix: make pairs with block=0')
  chex.assert_rank([pos, neg], 2)
  chex.assert_equal_shape([neg, false, where])
  pos, neg = to_float32(pos), jnp.where(where, to_float32(neg), 0)
  false, p, n = false & where, scale(pos, temperature), scale(neg, temperature)
  every = jnp.ones(pos.shape, bool)
  kept = where if attract else where & ~false
  total = jax.nn.logsumexp(masked(jnp.concatenate([p, n], axis=1), jnp.concatenate([every, kept], axis=1)), axis=1)
  if not attract:
    return total - jnp.mean(p, axis=1)
  drawn = jnp.sum(p, axis=1) + jnp.sum(jnp.where(false, n, 0), axis=1)
  return total - drawn / (pos.shape[1] + jnp.sum(false, axis=1).astype(p.dtype))
