"""Reductions over negatives that several losses share."""

import functools

import jax
import jax.numpy as jnp

from ssl_jax.arrays import check_sharding
from ssl_jax.registry import require
from ssl_jax.stream import Stream


def masked(x: jax.Array, where: jax.Array | None) -> jax.Array:
  """x, with -inf where `where` is False. A query without negatives keeps all entries: its unused value stays finite.

  >>> print(masked(jnp.zeros((1, 2)), jnp.array([[True, False]])))
  [[  0. -inf]]
  """
  assert where is not None  # set by `contrastive_loss`
  return jnp.where(where | ~where.any(axis=1, keepdims=True), x, -jnp.inf)


def logsumexp(x: jax.Array | Stream, where: jax.Array | None) -> jax.Array:
  """log sum e^x over the negatives.  [Q, M], [Q, M] -> [Q]

  >>> print(logsumexp(jnp.zeros((1, 3)), jnp.array([[True, True, False]])))
  [0.6931]
  """
  return x.logsumexp() if isinstance(x, Stream) else jax.nn.logsumexp(masked(x, where), axis=1)


def softmax_mean(logits: jax.Array, values: jax.Array, where: jax.Array | None) -> jax.Array:
  """The mean of `values` over the negatives, with weights softmax(logits).  [Q, M], [Q, M], [Q, M] -> [Q]

  >>> print(softmax_mean(jnp.zeros((1, 3)), jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[True, True, False]])))
  [1.5]
  """
  if isinstance(logits, Stream):
    return logits.softmax_mean(values)  # `values` is a stream, too
  return jnp.sum(jax.nn.softmax(masked(logits, where), axis=1) * values, axis=1)


def total(x: jax.Array | Stream, where: jax.Array | None) -> jax.Array:
  """The sum over the negatives.  [Q, M], [Q, M] -> [Q]

  >>> print(total(jnp.ones((1, 3)), jnp.array([[True, True, False]])))
  [2.]
  """
  if isinstance(x, Stream):
    return x.sum()
  assert where is not None  # set by `contrastive_loss`
  return jnp.sum(jnp.where(where, x, 0), axis=1)


def count(neg: jax.Array | Stream, where: jax.Array | None) -> jax.Array:
  """The number of negatives of each query.  [Q, M], [Q, M] -> integers [Q]

  >>> count(jnp.ones((1, 3)), jnp.array([[True, True, False]])).tolist()
  [2]
  """
  if isinstance(neg, Stream):
    return neg.count()
  assert where is not None  # set by `contrastive_loss`
  return jnp.sum(where, axis=1)


def log_mean_exp(x: jax.Array, counts: jax.Array, *, axis_name: str | None) -> jax.Array:
  """log(sum e^x / sum counts) over the entries with counts above 0, on all devices.  [...], [...] -> []"""
  check_sharding(x, axis_name)
  where, counts = counts.astype(bool), counts.astype(x.dtype)  # float: a large batch has more than 2^31 pairs
  shift = jnp.max(jax.lax.stop_gradient(x), where=where, initial=-jnp.inf)
  if axis_name is not None:
    shift = jax.lax.pmax(shift, axis_name)
  shift = jnp.where(jnp.isfinite(shift), shift, 0)
  summed = jnp.sum(jnp.exp(jnp.where(where, x - shift, -jnp.inf)))
  number = jnp.sum(counts)
  if axis_name is not None:
    summed, number = jax.lax.pmean((summed, number), axis_name)
  return shift + jnp.log(jnp.where(number > 0, summed, 1)) - jnp.log(jnp.where(number > 0, number, 1))


def log_mean_exp_by_pair(x: jax.Array, counts: jax.Array, *, view_pairs: int, axis_name: str | None) -> jax.Array:
  """`log_mean_exp` of each of `view_pairs` consecutive groups of queries, repeated for each query.  [Q], [Q] -> [Q]"""
  require('view_pairs', view_pairs, lambda n: n > 0 and len(x) % n == 0, f'a divisor of the {len(x)} queries')
  of_group = jax.vmap(functools.partial(log_mean_exp, axis_name=axis_name))
  return jnp.repeat(of_group(x.reshape(view_pairs, -1), counts.reshape(view_pairs, -1)), len(x) // view_pairs)
