"""Similarities [Q, M] that are computed one block at a time, and their reductions over the keys.

A `Stream` represents an array [Q, M], an elementwise function of the dot products of Q queries and M keys. Arithmetic
on a stream gives another stream; `logsumexp`, `softmax_mean` and `sum` reduce it to [Q]. No array of size [Q, M] is
stored: the forward pass keeps its inputs and results [Q], and the backward pass recomputes the similarities.

On an NVIDIA GPU, a block stays in on-chip memory (`ssl_jax.kernels`). Elsewhere, and as a reference for testing the
kernels, plain JAX loops over blocks of queries. Both use `tile_sums` and `tile_gradient`.

On multiple devices, `axis_name` passes the keys around a ring (`ppermute`), so that no device ever holds all keys.
Values and gradients are the same as with gathered keys (see `ssl_jax.pairs`).
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax import kernels
from ssl_jax.kernels import LOW, Stats, tile_gradient, tile_sums

_form = 'auto'


class NotStreamableError(Exception):
  """Raised if a function of the similarity closes over an array or an integer. The loss then uses blocks of queries."""


@contextlib.contextmanager
def form(name: str) -> Iterator[None]:
  """Sets how reductions are computed: in 'plain' JAX, by a 'kernel', by a kernel in 'interpret' mode, or 'auto'.

  'auto', the default, is a kernel on a GPU that `ssl_jax.kernels` supports and plain JAX elsewhere. The form applies to
  functions that are traced inside the context, not to those that `jit` has already compiled.

  >>> with form('plain'):
  ...   pass
  """
  global _form
  before, _form = _form, name
  try:
    yield
  finally:
    _form = before


class Source(NamedTuple):
  """The factors of a stream's dot products: `queries` [Q, D] and `keys` [M, D], None if the queries are the keys.

  `own` [Q] and `instances` [M] are integers: a key is a negative of every query of another instance. `block` is the
  number of queries computed at a time in plain JAX. With `axis_name`, the keys of all devices are used.
  """

  queries: jax.Array
  keys: jax.Array | None
  own: jax.Array
  instances: jax.Array
  block: int
  axis_name: str | None = None


@dataclasses.dataclass(frozen=True)
class Stream:
  """A virtual array [Q, M], function(s, *operands), of which only reductions over the keys are computed.

  Attributes:
    source: where the similarities s come from.
    function: takes a scalar s and one scalar per operand; traceable by JAX. It may close over traced scalars.
    operands: arrays [Q], one value per query.

  >>> source = Source(jnp.eye(3), None, jnp.arange(3), jnp.arange(3), block=2)
  >>> print((2 * Stream(source)).logsumexp(), Stream(source).count())
  [0.6931 0.6931 0.6931] [2 2 2]
  """

  source: Source
  function: Callable[..., jax.Array] = lambda s: s
  operands: tuple[jax.Array, ...] = ()

  def apply(self, function: Callable[..., jax.Array], *operands: jax.Array) -> 'Stream':
    """function(x, *operands), elementwise; operands are [Q] or [Q, 1]."""
    mine, count = self.function, len(self.operands)
    return Stream(
      self.source,
      lambda s, *given: function(mine(s, *given[:count]), *given[count:]),
      (*self.operands, *(x.reshape(-1) for x in operands)),
    )

  def logsumexp(self) -> jax.Array:
    """log sum e^x over the negatives of each query; 0 where there are none.  -> [Q]"""
    return _reduce(self)[0]

  def softmax_mean(self, values: 'Stream') -> jax.Array:
    """The mean of `values` with weights softmax(x) over the negatives of each query; 0 where there are none.  -> [Q]"""
    return _reduce(self, values)[1]

  def sum(self) -> jax.Array:
    """The sum over the negatives of each query.  -> [Q]"""
    # With logits of 0, all weights are equal, so the weighted mean is the plain mean.
    return self.count().astype(self.source.queries.dtype) * (0 * self).softmax_mean(self)

  def count(self) -> jax.Array:
    """The number of negatives of each query.  -> integers [Q]"""
    own, instances, axis_name = self.source.own, self.source.instances, self.source.axis_name
    if axis_name is not None:
      instances = jax.lax.all_gather(instances, axis_name, tiled=True)
    ordered = jnp.sort(instances)
    first, last = (jnp.searchsorted(ordered, own, side=side) for side in ('left', 'right'))
    return len(instances) - (last - first)

  def _with(self, function: Callable, other: Any) -> 'Stream':
    if isinstance(other, Stream):
      mine, count = self.function, len(self.operands)
      both = lambda s, *given: function(mine(s, *given[:count]), other.function(s, *given[count:]))
      return Stream(self.source, both, (*self.operands, *other.operands))
    if np.ndim(other) == 0:
      return self.apply(lambda x: function(x, other))
    return self.apply(function, other)

  def __add__(self, other: Any) -> 'Stream':
    return self._with(operator.add, other)

  def __sub__(self, other: Any) -> 'Stream':
    return self._with(operator.sub, other)

  def __mul__(self, other: Any) -> 'Stream':
    return self._with(operator.mul, other)

  def __truediv__(self, other: Any) -> 'Stream':
    return self._with(operator.truediv, other)

  def __rsub__(self, other: Any) -> 'Stream':
    return self._with(lambda x, y: y - x, other)

  def __neg__(self) -> 'Stream':
    return self.apply(operator.neg)

  __radd__, __rmul__ = __add__, __mul__


class _Plan(NamedTuple):
  """The static part of a reduction, without its arrays."""

  jaxpr: Any  # scalars (s, *operands) -> (logit,) or (logit, value); its constants are the last operands
  values: bool
  block: int
  axis_name: str | None
  form: str

  def function(self, s: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    count = len(self.jaxpr.invars) - 1
    evaluate = kernels.evaluate if self.form == 'kernel' else jax.core.eval_jaxpr
    return tuple(evaluate(self.jaxpr, operands[count:], s, *operands[:count]))


def _reduce(logits: Stream, values: Stream | None = None) -> tuple[jax.Array, ...]:
  """The logsumexp of `logits` over the negatives, and the mean of `values` with the softmax as weights.  -> each [Q]"""
  source, count = logits.source, len(logits.operands)
  operands = (*logits.operands, *(values.operands if values else ()))

  def function(s, *given):
    found = [logits.function(s, *given[:count])]
    if values is not None:
      found.append(values.function(s, *given[count:]))
    return tuple(x.astype(source.queries.dtype) for x in found)  # a parameter may have another type

  scalars = [jax.ShapeDtypeStruct((), x.dtype) for x in (source.queries, *operands)]
  closed = jax.make_jaxpr(function)(*scalars)
  # A kernel cannot close over arrays: traced scalars, such as a learned temperature, become operands.
  if any(np.ndim(x) or not jnp.issubdtype(x.dtype, jnp.floating) for x in closed.consts):
    raise NotStreamableError
  taken = tuple(jnp.broadcast_to(x, len(source.queries)) for x in closed.consts)

  plan = _Plan(closed.jaxpr, values is not None, source.block, source.axis_name, _form)
  found = _total(plan, source.queries, source.keys, source.own, source.instances, (*operands, *taken))
  some = ~(found[0] <= LOW / 2)  # NaN is kept
  return tuple(jnp.where(some, x, 0) for x in found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(plan, queries, keys, own, instances, operands):
  one = functools.partial(_choose, plan, _kernel_sums, _plain_sums)
  if plan.axis_name is None:
    return one(queries, own, operands, queries if keys is None else keys, instances)

  def turn(_, carry):
    keys, instances, found = carry
    found = _merge(found, one(queries, own, operands, keys, instances))
    return *_next((keys, instances), plan.axis_name), found

  nothing = (jnp.full_like(queries[:, 0], LOW), *[jnp.zeros_like(queries[:, 0])] * plan.values)
  return jax.lax.fori_loop(0, jax.lax.axis_size(plan.axis_name), turn, (keys, instances, nothing))[-1]


def _total_forward(plan, *arrays):
  found = _total(plan, *arrays)
  return found, (arrays, found)


def _total_backward(plan, saved, cotangents):
  (queries, keys, own, instances, operands), (logsumexp, *means) = saved
  stats = Stats(operands, logsumexp, cotangents[0], tuple(means), tuple(cotangents[1:]))
  one = functools.partial(_choose, plan, _kernel_gradient, _plain_gradient)
  if plan.axis_name is None:
    d_queries, d_keys, d_operands = one(queries, own, stats, keys, instances)
    return d_queries, d_keys, None, None, d_operands

  def turn(_, carry):
    keys, instances, d_keys, *found = carry
    d_queries, more, d_operands = one(queries, own, stats, keys, instances)
    found = jax.tree.map(jnp.add, found, [d_queries, d_operands])
    return *_next((keys, instances, d_keys + more), plan.axis_name), *found

  start = jax.tree.map(jnp.zeros_like, (keys, queries, operands))
  turns = jax.lax.axis_size(plan.axis_name)
  *_, d_keys, d_queries, d_operands = jax.lax.fori_loop(0, turns, turn, (keys, instances, *start))
  return d_queries, d_keys, None, None, d_operands


_total.defvjp(_total_forward, _total_backward)


def _next(arrays: Any, axis_name: str) -> Any:
  """The arrays of the previous device in the ring."""
  size = jax.lax.axis_size(axis_name)
  return jax.lax.ppermute(arrays, axis_name, [(i, (i + 1) % size) for i in range(size)])


def _merge(one, other):
  """Combines the (logsumexp, mean) of two sets of keys into that of their union."""
  both = jnp.logaddexp(one[0], other[0])
  shares = jnp.exp(one[0] - both), jnp.exp(other[0] - both)
  return both, *(shares[0] * x + shares[1] * y for x, y in zip(one[1:], other[1:], strict=True))


def _choose(plan, kernel, plain, queries, own, given, keys, instances):
  kernel = functools.partial(kernel, plan._replace(form='kernel'), interpret=plan.form == 'interpret')
  plain = functools.partial(plain, plan._replace(form='plain'))
  arrays = (queries, own, given, keys, instances)
  if plan.form in ('kernel', 'interpret'):
    return kernel(*arrays)
  if plan.form == 'plain' or not kernels.fits(queries, queries if keys is None else keys):
    return plain(*arrays)
  return jax.lax.platform_dependent(*arrays, cuda=kernel, default=plain)


def _kernel_sums(plan, queries, own, operands, keys, instances, *, interpret):
  given = (queries, own, operands, keys, instances)
  return kernels.sums(plan.function, *given, values=plan.values, interpret=interpret)


def _kernel_gradient(plan, queries, own, stats, keys, instances, *, interpret):
  of = functools.partial(kernels.gradient, plan.function, interpret=interpret)
  if keys is None:  # each row is both a query and a key: the similarities are computed once for both
    d_queries, d_operands = of(queries, own, queries, instances, of_rows=stats, of_columns=stats)
    return d_queries, None, d_operands
  d_queries, d_operands = of(queries, own, keys, instances, of_rows=stats, of_columns=None)
  d_keys, _ = of(keys, instances, queries, own, of_rows=None, of_columns=stats)
  return d_queries, d_keys, d_operands


def in_blocks(block: int, function: Callable, start: Any, *by_query: Any) -> tuple[Any, Any]:
  """Scans function(carry, (is_query, *by_query)) -> (carry, results) over blocks of queries.

  Blocks are of nearly equal size, at most `block`, to minimize padding. Padding repeats the last query, because a
  temperature must not be 0; `is_query` is False there.

  Shapes: each [Q, ...] -> carry, results [Q, ...].
  """
  total = len(by_query[0])
  count = -(-total // block)
  size = -(-total // count)

  def split(x):
    x = jnp.pad(x, [(0, count * size - total), *[(0, 0)] * (x.ndim - 1)], mode='edge')
    return x.reshape(count, size, *x.shape[1:])

  is_query = jnp.arange(count * size).reshape(count, size) < total
  carry, found = jax.lax.scan(function, start, (is_query, *jax.tree.map(split, by_query)))
  return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:total], found)


def _product(x, y):
  return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _plain_sums(plan, queries, own, operands, keys, instances):
  def block(_, given):
    _, queries, own, operands = given
    where = own[:, None] != instances[None]
    least = jnp.full_like(queries[:, 0], LOW)
    top, total, *weighted = tile_sums(plan.function, _product(queries, keys.T), where, operands, least)
    return None, (top + jnp.log(total), *(x / total for x in weighted))

  return in_blocks(plan.block, block, None, queries, own, operands)[1]


def _plain_gradient(plan, queries, own, stats, keys, instances):
  others = queries if keys is None else keys

  def block(d_keys, given):
    is_query, queries, own, stats = given
    where = (own[:, None] != instances[None]) & is_query[:, None]
    d_s, *d_operands = tile_gradient(plan.function, _product(queries, others.T), where, stats, axis=0)
    return d_keys + _product(d_s.T, queries), (_product(d_s, others), tuple(d_operands))

  d_keys, (d_queries, d_operands) = in_blocks(plan.block, block, jnp.zeros_like(others), queries, own, stats)
  return (d_queries + d_keys, None, d_operands) if keys is None else (d_queries, d_keys, d_operands)
