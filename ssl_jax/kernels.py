"""GPU kernels that reduce similarities over the keys and never write a similarity to global memory.

`sums` loops over the keys for each block of queries with an online logsumexp, as in flash attention. `gradient`
recomputes the similarities and immediately multiplies their gradient by the keys. The function of the similarity (the
temperature) and its derivative are traced into the kernel. The kernels use no atomic additions, so results are bitwise
reproducible.

Precision: each float32 number is split into a sum of two bfloat16 numbers, and each product into three bfloat16
products, which are added in float32, smallest first. The relative error per factor is about 2^-18, compared with 2^-11
for TF32. Products of tiles are summed outside the tensor cores, which round toward 0 at each step: that error would
accumulate over many keys.

`tile_sums` and `tile_gradient` compute one tile. The plain JAX implementation in `ssl_jax.stream` uses them, too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOW = -1e30  # logit of a key that is not a negative; with -inf, the difference of two such logits would be NaN


class Stats(NamedTuple):
  """What the backward pass needs, one value per query: every array is [Q].

  `operands` are those of the function, `logsumexp` and `means` the results of the forward pass, and `d_...` their
  cotangents. `means` and `d_means` have one entry, or none if the function returns no values to average.
  """

  operands: tuple[jax.Array, ...]
  logsumexp: jax.Array
  d_logsumexp: jax.Array
  means: tuple[jax.Array, ...] = ()
  d_means: tuple[jax.Array, ...] = ()


class Tiles(NamedTuple):
  """The rows and columns of a tile of similarities, and the warps and pipeline stages of its kernel."""

  rows: int
  columns: int
  warps: int
  stages: int


FORWARD = Tiles(128, 32, 4, 3)  # fastest of 9 settings on an H200 (of 8 for BACKWARD); half the rows above width 128
BACKWARD = Tiles(64, 64, 4, 2)
CAPABILITIES = ('8.0', '9.0', '10.0')  # A100; H100 and H200; B200. Other GPUs have less on-chip memory.
WIDEST = 256  # wider embeddings do not fit in on-chip memory


def _on_tile(function: Callable, axis: int) -> Callable:
  """Vectorizes a function of scalars over a tile [x, y]; the operands vary along one axis of the tile."""

  def on_tile(s, *operands):
    inner, outer = (None, 0) if axis == 0 else (0, None)
    count = len(operands)
    return jax.vmap(jax.vmap(function, (0, *[inner] * count)), (0, *[outer] * count))(s, *operands)

  return on_tile


def tile_sums(
  function: Callable, s: jax.Array, where: jax.Array, operands: tuple[jax.Array, ...], least: jax.Array
) -> tuple[jax.Array, ...]:
  """Per row: the largest logit (at least `least`), the sum of w = e^(logit - largest), and any sum of w · value.

  Shapes: [x, y], [x, y], each [x], [x] -> each [x].
  """
  # The function may be infinite at s = 1, the query itself. Masking s instead of its results takes 1.5 times as long.
  logits, *values = _on_tile(function, 0)(s, *operands)
  logits, values = jnp.where(where, logits, LOW), [jnp.where(where, v, 0) for v in values]
  top = jnp.maximum(least, jnp.max(logits, axis=1))
  weights = jnp.exp(logits - top[:, None])
  return top, jnp.sum(weights, axis=1), *(jnp.sum(weights * v, axis=1) for v in values)


def tile_gradient(function: Callable, s: jax.Array, where: jax.Array, stats: Stats, axis: int) -> tuple[jax.Array, ...]:
  """The gradients with respect to s [x, y] and to each operand; the queries lie along `axis` of the tile."""
  spread = lambda x: x[:, None] if axis == 0 else x[None]
  s = jnp.where(where, s, 0)  # the function may have no derivative at s = 1, the query itself
  (logits, *values), pull = jax.vjp(_on_tile(function, axis), s, *stats.operands)
  weights = jnp.where(where, jnp.exp(logits - spread(stats.logsumexp)), 0)
  d_logits, d_values = spread(stats.d_logsumexp), []
  for value, mean, d_mean in zip(values, stats.means, stats.d_means, strict=True):
    d_logits = d_logits + spread(d_mean) * (value - spread(mean))
    d_values.append(weights * spread(d_mean))
  return pull((weights * d_logits, *d_values))


@jax.custom_jvp
def cosine(x: jax.Array) -> jax.Array:
  """cos x with an error of up to 7e-7 for |x| < 10, computed as 1 - 2 sin²(x / 2).

  The cosine of the GPU's math library has a branch for large x that doubles the run time of a kernel.

  >>> print(cosine(jnp.array([0.0, 1.0, 3.0])).round(4))
  [ 1.      0.5403 -0.99  ]
  """
  turns = jnp.floor(x * (0.5 / math.pi) + 0.5)
  y = x * 0.5 - turns * 3.140625 - turns * (math.pi - 3.140625)  # pi is the sum of two parts; the first has few digits
  square = y * y
  series = (2.5904885e-06, -1.9800897e-04, 8.3328998e-03, -1.6666648e-01, 1.0)  # minimax polynomial for sin y / y in y²
  sine = functools.reduce(lambda total, factor: total * square + factor, series[1:], jnp.full_like(y, series[0])) * y
  return 1 - 2 * sine * sine


def _sine(x):
  return cosine(x - 0.5 * math.pi)


cosine.defjvps(lambda tangent, value, x: -tangent * _sine(x))
_FAST: dict[str, Any] = {'cos': cosine, 'sin': _sine}


def evaluate(jaxpr: Any, constants: Sequence[jax.Array], *arguments: jax.Array) -> list[jax.Array]:
  """Evaluates a jaxpr of elementwise operations, with a cosine and a sine that are fast in a kernel.

  >>> closed = jax.make_jaxpr(lambda x: 2 * jnp.cos(x))(1.0)
  >>> print(evaluate(closed.jaxpr, closed.consts, 0.0))
  [Array(2., dtype=float32)]
  """
  if any('call_jaxpr' in equation.params for equation in jaxpr.eqns):  # a function with a custom derivative
    return jax.core.eval_jaxpr(jaxpr, constants, *arguments)
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
  read = lambda x: x.val if hasattr(x, 'val') else values[x]
  for equation in jaxpr.eqns:
    primitive, given = equation.primitive, [read(x) for x in equation.invars]
    if primitive.name in _FAST:
      found = _FAST[primitive.name](*given)
    elif primitive.name in ('jit', 'pjit'):
      found = evaluate(equation.params['jaxpr'].jaxpr, equation.params['jaxpr'].consts, *given)
    else:
      found = primitive.bind(*given, **equation.params)
    found = found if isinstance(found, list | tuple) else [found]
    values.update(zip(equation.outvars, found, strict=True))
  return [read(x) for x in jaxpr.outvars]


def fits(queries: jax.Array, keys: jax.Array) -> bool:
  """Whether the kernels support these arrays and the GPU of this process.

  >>> fits(jnp.ones((2, 3)), jnp.ones((2, 3)))
  False
  """
  if jax.default_backend() != 'gpu' or queries.shape[1] > WIDEST or not queries.dtype == keys.dtype == jnp.float32:
    return False
  return getattr(jax.devices()[0], 'compute_capability', '') in CAPABILITIES


def sums(
  function: Callable,
  queries: jax.Array,
  own: jax.Array,
  operands: tuple[jax.Array, ...],
  keys: jax.Array,
  instances: jax.Array,
  *,
  values: bool,
  tiles: Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """The logsumexp of the logits over the negatives and, if `values`, the mean of the values with softmax weights.

  `function(s, *operands)` returns (logit,) or, if `values`, (logit, value).

  Shapes: [Q, D], [Q], each [Q], [M, D], [M] -> each [Q]. The logsumexp of a query without negatives is at most LOW / 2.
  """
  from jax.experimental import pallas as pl  # imported here so that losses without kernels do not load it

  tiles, count = tiles or _fitting(FORWARD, queries), len(operands)

  def kernel(hi, lo, own, *refs):
    operands, (k_hi, k_lo, instances), outs = refs[:count], refs[count : count + 3], refs[count + 3 :]
    hi, lo, own, operands = hi[...], lo[...], own[...], tuple(x[...] for x in operands)

    def body(j, carry):
      at = pl.ds(j * tiles.columns, tiles.columns)
      s = _products(hi, lo, k_hi[at, :], k_lo[at, :])
      where = own[:, None] != instances[at][None]
      where = where if len(keys) % tiles.columns == 0 else where & _inside(j, tiles.columns, len(keys))
      top, *added = tile_sums(function, s, where, operands, carry[0])
      shrink = jnp.exp(carry[0] - top)
      return top, *(x * shrink + y for x, y in zip(carry[1:], added, strict=True))

    start = (jnp.full(tiles.rows, LOW, jnp.float32), *[jnp.zeros(tiles.rows, jnp.float32)] * (1 + values))
    top, total, *weighted = jax.lax.fori_loop(0, -(-len(keys) // tiles.columns), body, start)
    for out, x in zip(outs, (top + jnp.log(total), *(x / total for x in weighted)), strict=True):
      out[...] = x

  given = [*_split(queries), own, *operands]
  rest = [*_split(keys), instances]
  return tuple(_call(kernel, given, rest, [()] * (1 + values), tiles, interpret))


def gradient(
  function: Callable,
  x: jax.Array,
  x_ids: jax.Array,
  y: jax.Array,
  y_ids: jax.Array,
  *,
  of_rows: Stats | None,
  of_columns: Stats | None,
  tiles: Tiles | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The gradient with respect to x, whose rows are queries (`of_rows`), keys for the queries y (`of_columns`), or both.

  Shapes: [X, D], [X], [Y, D], [Y] -> [X, D], and [X] for each operand of `of_rows`.
  """
  from jax.experimental import pallas as pl

  tiles = tiles or _fitting(BACKWARD, x)
  row_leaves, row_tree = jax.tree.flatten(of_rows)
  column_leaves, column_tree = jax.tree.flatten(of_columns)
  count, found = len(row_leaves), len(of_rows.operands) if of_rows else 0

  def kernel(hi, lo, ids, *refs):
    rows, (y_hi, y_lo, y_ids, *columns) = refs[:count], refs[count : count + 3 + len(column_leaves)]
    d_x, *d_operands = refs[count + 3 + len(column_leaves) :]
    hi, lo, ids, rows = hi[...], lo[...], ids[...], jax.tree.unflatten(row_tree, [r[...] for r in rows])

    def body(j, carry):
      at = pl.ds(j * tiles.columns, tiles.columns)
      k_hi, k_lo = y_hi[at, :], y_lo[at, :]
      s = _products(hi, lo, k_hi, k_lo)
      where = ids[:, None] != y_ids[at][None]
      where = where if len(y) % tiles.columns == 0 else where & _inside(j, tiles.columns, len(y))
      d_s: Any = 0.0
      added: Sequence[jax.Array] = ()
      if of_rows:
        d_s, *added = tile_gradient(function, s, where, rows, axis=0)
      if of_columns:
        d_s += tile_gradient(function, s, where, jax.tree.unflatten(column_tree, [c[at] for c in columns]), axis=1)[0]
      d_hi = d_s.astype(jnp.bfloat16)
      d_lo = (d_s - d_hi.astype(jnp.float32)).astype(jnp.bfloat16)
      product = _dot(d_hi, k_lo, 0) + _dot(d_lo, k_hi, 0) + _dot(d_hi, k_hi, 0)
      return carry[0] + product, *(c + a for c, a in zip(carry[1:], added, strict=True))

    start = (jnp.zeros((tiles.rows, hi.shape[1]), jnp.float32), *[jnp.zeros(tiles.rows, jnp.float32)] * found)
    done = jax.lax.fori_loop(0, -(-len(y) // tiles.columns), body, start)
    for out, value in zip((d_x, *d_operands), done, strict=True):
      out[...] = value

  given = [*_split(x), x_ids, *row_leaves]
  rest = [*_split(y), y_ids, *column_leaves]
  d_x, *d_operands = _call(kernel, given, rest, [(_width(x),), *[()] * found], tiles, interpret)
  return d_x[:, : x.shape[1]], tuple(d_operands)


def _call(kernel, by_row, by_column, outs, tiles, interpret):
  """Runs a kernel on each block of rows, with access to all columns; `outs` are the shapes of its results per row."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as plgpu

  total = len(by_row[0])
  pad = lambda x, size: jnp.pad(x, [(0, -len(x) % size), *[(0, 0)] * (x.ndim - 1)], mode='edge')
  by_row, by_column = [pad(x, tiles.rows) for x in by_row], [pad(x, tiles.columns) for x in by_column]
  rows = len(by_row[0])
  block = lambda x: pl.BlockSpec((tiles.rows, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))
  whole = lambda x: pl.BlockSpec(x.shape, lambda i: (0,) * x.ndim)
  shapes = [jax.ShapeDtypeStruct((rows, *shape), jnp.float32) for shape in outs]
  results = pl.pallas_call(
    kernel,
    grid=(rows // tiles.rows,),
    in_specs=[*map(block, by_row), *map(whole, by_column)],
    out_specs=[*map(block, shapes)],
    out_shape=shapes,
    compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
    interpret=interpret,
  )(*by_row, *by_column)
  return [x[:total] for x in results]


def _fitting(tiles: Tiles, x: jax.Array) -> Tiles:
  return tiles._replace(rows=tiles.rows // 2) if _width(x) > 128 else tiles


def _width(x: jax.Array) -> int:
  """The width of x, padded to a power of 2 as the kernels require."""
  return max(16, 1 << (x.shape[1] - 1).bit_length())


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits x [N, D] into a sum of two bfloat16 arrays, with the width padded by zeros."""
  x = jnp.pad(x, [(0, 0), (0, _width(x) - x.shape[1])])
  hi = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may remove a conversion to bfloat16 and back
  return hi.astype(jnp.bfloat16), (x - hi).astype(jnp.bfloat16)


def _dot(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
  """The float32 product of x [m, k] and y, which is [k, n] if axis is 0 and [n, k] if it is 1."""
  return jax.lax.dot_general(x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _products(hi, lo, k_hi, k_lo):
  """The similarities [x, y] of split rows and columns; the small terms are added first."""
  return _dot(hi, k_lo, 1) + _dot(lo, k_hi, 1) + _dot(hi, k_hi, 1)


def _inside(j, size: int, total: int) -> jax.Array:
  """bool [1, size]: which columns of the j-th block are among the first `total`; the others are padding."""
  return (j * size + jnp.arange(size) < total)[None]
