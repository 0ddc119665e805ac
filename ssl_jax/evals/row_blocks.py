"""Pairwise computations in blocks of rows. Time grows as n², memory does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Floats in one block of similarities: 256 MiB. Larger blocks are not faster.
ELEMENTS = 2**26


def similarities(x: jax.Array, y: jax.Array) -> jax.Array:
  """Dot products in full float32, which is not the default on GPUs and TPUs.  [n, d], [m, d] -> [n, m]"""
  return jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)


def others(index: jax.Array, n: int) -> jax.Array:
  """Mask that is False where a row meets its own example.  [q] -> bool [q, n]"""
  return index[:, None] != jnp.arange(n)[None, :]


def mean(x: ArrayLike) -> float:
  """The mean over rows, in float64."""
  return float(np.mean(np.asarray(x), dtype=np.float64))


def rows(n: int, columns: int) -> int:
  """The number of rows per block, for n rows of `columns` floats each."""
  return max(1, min(n, ELEMENTS // columns))


def map_rows(function: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
  """Applies `function` to blocks of `size` rows, one block at a time.  [n, ...] each -> [n, ...] each

  The last block is the last `size` rows, so every block has the same shape and no padded row needs a mask. Rows that
  are computed twice are dropped.
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
