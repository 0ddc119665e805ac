"""Batch norm, an optional addition and an optional ReLU as one function with a custom gradient, for GPUs.

A Pallas kernel computes the sums over the batch and reads every array once: x for Σ x and Σ x² in the forward pass; x
and the output gradient for the two sums of the backward pass, which include ReLU. If there is an addition before ReLU,
the kernel also writes the gradient before ReLU, which both branches need. XLA fuses the elementwise operations. There
are no atomic additions, so results are bitwise reproducible.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ssl_jax.arrays import check_sharding, to_float32

ROWS = 16  # rows of a tile: with 4 warps, each thread holds 8 neighboring numbers
COLUMNS = 64  # columns of a tile: a bfloat16 row is 128 bytes, which a GPU reads at once
LOADS = 8  # tiles loaded together, to hide memory latency
PROGRAMS = 1056  # maximum number of kernel programs: eight for each of an H200's 132 multiprocessors
LARGEST = 2**25  # maximum bytes of an array; for larger ones, XLA's sums are as fast (benchmarks/README.md)


def fits(x: jax.Array) -> bool:
  """Whether the kernels support x [..., C] and are faster than XLA on the device of this process.

  >>> fits(jnp.ones((256, 64)))
  False
  """
  if (
    jax.default_backend() != 'gpu' or x.dtype not in (jnp.bfloat16, jnp.float32) or x.size * x.dtype.itemsize > LARGEST
  ):
    return False
  channels = x.shape[-1]
  return channels % COLUMNS == 0 and x.size // channels % (ROWS * LOADS) == 0


def column_sums(
  function: Callable[..., tuple[jax.Array, jax.Array]],
  arrays: tuple[jax.Array, ...],
  vectors: tuple[jax.Array, ...] = (),
  *,
  store: bool = False,
  interpret: bool = False,
) -> list[jax.Array]:
  """The column sums of the two results of an elementwise function and, with `store`, its first result.

  Shapes: each [M, C], each [C] -> [2, C] in float32, and [M, C] in the dtype of the first array.
  """
  from jax.experimental import pallas as pl  # imported here so that models on a CPU do not load it
  from jax.experimental.pallas import triton as plgpu

  rows, channels = arrays[0].shape
  blocks, chunk = channels // COLUMNS, ROWS * LOADS
  chunks = rows // chunk
  programs = max(n for n in range(1, max(1, PROGRAMS // blocks) + 1) if chunks % n == 0)
  each = chunks // programs

  def kernel(*refs):
    by_row, refs = refs[: len(arrays)], refs[len(arrays) :]
    given, (out, *stored) = [ref[...][None] for ref in refs[: len(vectors)]], refs[len(vectors) :]

    def body(k, totals):
      tiles = [pl.ds(k * chunk + i * ROWS, ROWS) for i in range(LOADS)]
      loaded = [[ref[at, :] for ref in by_row] for at in tiles]
      for at, tile in zip(tiles, loaded, strict=True):
        found = function(*(x.astype(jnp.float32) for x in tile), *given)
        totals = tuple(x + y for x, y in zip(totals, found, strict=True))
        for ref in stored:
          ref[at, :] = found[0].astype(ref.dtype)
      return totals

    totals = jax.lax.fori_loop(0, each, body, (jnp.zeros((ROWS, COLUMNS)),) * 2)
    for i, total in enumerate(totals):
      out[i, :] = total.sum(0)

  block = pl.BlockSpec((each * chunk, COLUMNS), lambda i, j: (i, j))
  partial, *kept = pl.pallas_call(
    kernel,
    grid=(programs, blocks),
    in_specs=[*[block] * len(arrays), *[pl.BlockSpec((COLUMNS,), lambda i, j: (j,))] * len(vectors)],
    out_specs=[pl.BlockSpec((2, COLUMNS, None), lambda i, j: (0, j, i)), *[block] * store],
    out_shape=[
      jax.ShapeDtypeStruct((2, channels, programs), jnp.float32),
      *[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * store,
    ],
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
  )(*arrays, *vectors)
  return [partial.sum(2), *kept]


def _means(sums, count, axis_name):
  """Means over the global batch, from local sums (an array or a tuple of arrays)."""
  means = jax.tree.map(lambda x: x / count, sums)
  if axis_name is not None:
    check_sharding(jax.tree.leaves(means)[0], axis_name)
    means = jax.lax.pmean(means, axis_name)
  return means


def statistics(sums: Any, count: int, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
  """Mean and biased variance of the global batch from the local Σ x and Σ x².  [2, C] or two of [C] -> [C], [C]"""
  mean, mean_square = _means(sums, count, axis_name)
  return mean, jnp.maximum(mean_square - jnp.square(mean), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def normalize(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  add: jax.Array | None,
  relu: bool,
  epsilon: float,
  axis_name: str | None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """batch_norm(x) + add, with ReLU if `relu`; and the mean and variance of the global batch, which have no gradient.

  Shapes: [..., C], [C], [C], [..., C] or None -> [..., C], [C], [C].
  """
  return _forward(x, scale, bias, add, relu, epsilon, axis_name, interpret)[0]


def _forward(x, scale, bias, add, relu, epsilon, axis_name, interpret):
  rows = x.reshape(-1, x.shape[-1])
  (sums,) = column_sums(lambda x: (x, x * x), (rows,), interpret=interpret)
  mean, var = statistics(sums, len(rows), axis_name)
  rstd = jax.lax.rsqrt(var + epsilon)
  y = to_float32(rows) * (scale * rstd)[None] + (bias - mean * scale * rstd)[None]
  y = y if add is None else y + to_float32(add.reshape(rows.shape))
  y = (jnp.maximum(y, 0.0) if relu else y).astype(x.dtype).reshape(x.shape)
  # Without an addition, the sign before ReLU is recomputed from x, which is faster than reading y.
  y_for_sign = y if relu and add is not None else None
  added = None if add is None else jnp.zeros(0)  # marks an addition: None or an array is static, a bool would be traced
  return (y, mean, var), (x, y_for_sign, added, (mean, rstd, scale, bias))


def _backward(relu, epsilon, axis_name, interpret, saved, cotangents):
  """With d the gradient before ReLU and x̂ = (x - mean) · rstd: dx = scale · rstd · (d - mean(d) - x̂ · mean(d · x̂))."""
  x, y, added, vectors = saved
  arrays = tuple(v.reshape(-1, x.shape[-1]) for v in (cotangents[0], x, y) if v is not None)

  def terms(dy: jax.Array, x: jax.Array, *rest: Any):
    *y, mean, rstd, scale, bias = rest
    x_hat = (x - mean) * rstd
    d = jnp.where((y[0] if y else x_hat * scale + bias) > 0, dy, 0.0) if relu else dy
    return d, d * x_hat

  sums, *kept = column_sums(terms, arrays, vectors, store=y is not None, interpret=interpret)
  mean_d, mean_dx = _means(sums, len(arrays[0]), axis_name)
  mean, rstd, scale, bias = (v[None] for v in vectors)
  d = to_float32(kept[0]) if kept else terms(*map(to_float32, arrays), mean, rstd, scale, bias)[0]
  x_hat = (to_float32(arrays[1]) - mean) * rstd
  dx = scale * rstd * (d - mean_d[None] - x_hat * mean_dx[None])
  as_x = lambda v: v.astype(x.dtype).reshape(x.shape)
  return as_x(dx), sums[1], sums[0], None if added is None else as_x(d)


normalize.defvjp(_forward, _backward)
