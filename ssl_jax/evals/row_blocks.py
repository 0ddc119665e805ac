"""Pairwise work in blocks of rows: time may grow as n², memory may not."""

import jax
import jax.numpy as jnp

# Floats of one block of similarities: 256 MiB. Larger blocks are no faster.
ELEMENTS = 2**26


def unit(x):
  """L2-normalised rows; a zero row stays zero.  [..., d] -> [..., d]"""
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def similarities(x, y):
  """Dot products in full float32, which GPUs and TPUs do not use unasked.  [n, d], [m, d] -> [n, m]"""
  return jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)


def rows(n: int, columns: int) -> int:
  """How many of n rows to take at a time, where each needs `columns` floats."""
  return max(1, min(n, ELEMENTS // columns))


def map_rows(function, size: int, *arrays):
  """Applies `function` to blocks of `size` rows, one block at a time.  [n, ...] each -> [n, ...] each

  The last block is the last `size` rows, so that every block has one shape and there are no padded rows to mask; what
  it computes a second time is cut off.
  """
  n = arrays[0].shape[0]
  size = min(size, n)
  blocks = -(-n // size)
  starts = jnp.minimum(jnp.arange(blocks) * size, n - size)
  out = jax.lax.map(lambda i: function(*(jax.lax.dynamic_slice_in_dim(x, i, size) for x in arrays)), starts)
  left = n - (blocks - 1) * size

  def join(y):
    return jnp.concatenate([y[:-1].reshape((blocks - 1) * size, *y.shape[2:]), y[-1, size - left :]])

  return jax.tree.map(join, out)
