"""Turns embeddings into the similarities of each query with its positives and negatives.

Each function chooses the negatives in its own way and returns `Pairs`, the input of the contrastive losses in
`ssl_jax.losses`. Embeddings are `[B, D]`, of any scale and float type. They are normalized here, unless `similarity` is
'dot' or 'euclidean'. Similarities are float32.

Multiple devices: with `axis_name`, the queries are those of this device, and the negatives come from all devices.
Differentiate the mean over this device's queries, and average the gradients with `lax.pmean`. Because gradients flow
through the gathered embeddings, the result is the gradient of the mean over all queries. This holds under `jax.pmap`
and under `jax.shard_map(..., check_vma=False)`.

To save memory, set `block` above 0: `neg` is then a `NegativeBlocks`, and a loss computes the similarities of that many
queries at a time, with the same values and gradients. On an NVIDIA GPU, losses that only sum over negatives keep the
similarities in on-chip memory (`ssl_jax.stream`). With `ring`, these losses pass keys from device to
device instead of gathering them; the other losses gather them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.arrays import check_sharding, normalize, to_float32, varying_axes
from ssl_jax.registry import is_whole, require, require_choice
from ssl_jax.stream import Source, Stream, in_blocks


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('queries', 'keys', 'own', 'instances'),
  meta_fields=('similarity', 'block', 'symmetric', 'axis_name'),
)
@dataclasses.dataclass(frozen=True)
class NegativeBlocks:
  """Negatives that are computed block by block: the full `neg` and `where` of `Pairs` are never stored.

  Attributes:
    queries: `[Q, D]`.
    keys: `[M, D]`.
    own: integers `[Q]`, the instance of each query.
    instances: integers `[M]`, the instance of each key; a key is a negative of every query of another instance.
    similarity: 'cosine', 'dot' or 'euclidean'.
    block: the maximum number of queries computed at a time.
    symmetric: whether the queries are also the keys.
    axis_name: the mapped axis of a ring, in which `keys` and `instances` are only those of this device; None without a
      ring.

  >>> blocks = in_batch(jnp.eye(3), jnp.eye(3), block=2).neg
  >>> blocks.map(lambda neg, where: jnp.sum(where, axis=1)).tolist()
  [4, 4, 4, 4, 4, 4]
  """

  queries: jax.Array
  keys: jax.Array
  own: jax.Array
  instances: jax.Array
  similarity: str
  block: int
  symmetric: bool = False
  axis_name: str | None = None

  def stream(self) -> Stream | None:
    """The similarities for a loss that only sums over negatives; None if they are not dot products.

    Also None under `jax.shard_map(..., check_vma=True)`, whose types a stream does not track.
    """
    if self.similarity == 'euclidean' or varying_axes(self.queries) or varying_axes(self.keys):
      return None
    keys = None if self.symmetric else self.keys
    return Stream(Source(self.queries, keys, self.own, self.instances, self.block, self.axis_name))

  def map(self, function: Callable[..., Any], *by_query: Any) -> Any:
    """Applies function(neg [b, M], where [b, M], *by_query [b, ...]) -> [b, ...] to each block.  [Q, ...] -> [Q, ...]

    The backward pass recomputes each block instead of storing its intermediate values. With a ring, the keys are
    gathered first.
    """
    keys, instances = (gather(x, self.axis_name) for x in (self.keys, self.instances))

    @functools.partial(jax.checkpoint, prevent_cse=False)  # the scan already prevents it
    def of_block(queries, own, *by_query):
      neg = _similarities(queries, keys, self.similarity)
      return function(neg, own[:, None] != instances[None], *by_query)

    step = lambda _, given: (None, of_block(*given[1:]))
    return in_blocks(self.block, step, None, self.queries, self.own, *by_query)[1]


class Pairs(NamedTuple):
  """Similarities of Q queries.

  Attributes:
    pos: `[Q, K]`, with the K positives of each query.
    neg: `[Q, M]`, with M keys, -inf for keys that are not negatives; or `NegativeBlocks`, if `block` is above 0.
    where: `[Q, M]`, True where `neg` is a negative; None with `NegativeBlocks`, which have their own mask. A loss
      called without `where` derives it from `neg`.

  >>> Pairs(pos=jnp.ones((1, 1)), neg=jnp.zeros((1, 2)), where=jnp.ones((1, 2), bool)).neg.shape
  (1, 2)
  """

  pos: jax.Array
  neg: jax.Array | NegativeBlocks
  where: jax.Array | None


def in_batch(
  *views: jax.Array, axis_name: str | None = None, similarity: str = 'cosine', block: int = 0, ring: bool = False
) -> Pairs:
  """Every view of every other instance is a negative (SimCLR; with V > 2 views each has K = V - 1 positives).

  V views `[B, D]` of B instances give V·B queries, ordered view by view. The embeddings are normalized first if
  `similarity` is 'cosine'. The K = V - 1 positives of a query are the other views of its instance, in the order of the
  views. `neg` contains the similarities with all V·N embeddings of the N instances on all devices; `where` excludes the
  V views of the query's own instance. `axis_name` is the name of a mapped axis of `jax.pmap` or `jax.shard_map`.

  >>> pos, neg, where = in_batch(jnp.eye(3), jnp.eye(3))
  >>> pos.shape, neg.shape, int(where[0].sum())
  ((6, 1), (6, 6), 4)
  """
  axis = _ring_axis(ring, axis_name, block)
  views, others = _gathered_views(views, None if axis else axis_name, similarity)
  check_sharding(views, axis_name)
  count, batch, width = views.shape
  queries, keys = views.reshape(count * batch, width), others.reshape(count * others.shape[1], width)
  own, instances = _instances(batch, _total(others.shape[1], axis), axis_name)
  own, instances = (jnp.tile(x, count) for x in (own, own if axis else instances))
  pos = _positives(views, range(count), similarity).reshape(count * batch, count - 1)
  same = axis_name is None
  return Pairs(pos, *_negatives(queries, keys, own, instances, similarity, block, symmetric=same, axis_name=axis))


def by_view_pair(*views: jax.Array, axis_name: str | None = None, similarity: str = 'cosine') -> Pairs:
  """The pairs of the CACR authors' code, whose softmax over negatives never mixes views.

  For each pair of views x < y, the negatives of an instance's view x are the views y of all other instances. Each pair
  gives two blocks of B queries with these negatives: one with the positives of x and one with those of y (the other
  K = V - 1 views). This gives V(V - 1)·B queries. If the loss is separable, i.e. a term of the positives plus a term of
  the negatives (`cacr`, `balanced`, `simple`, ...), the mean over the queries is the authors' mean over views plus
  their mean over pairs.

  >>> pos, neg, where = by_view_pair(jnp.eye(4), jnp.eye(4), jnp.eye(4))
  >>> pos.shape, neg.shape, int(where[0].sum())
  ((24, 2), (24, 4), 3)
  """
  views, others = _gathered_views(views, axis_name, similarity)
  count = len(views)
  # One product per view: with one per pair, 11 views took 150 s to compile for a GPU.
  neg = [_similarities_by_view(views[x], others[x + 1 :], similarity) for x in range(count - 1)]
  neg = jnp.repeat(jnp.concatenate(neg), 2, axis=0)
  chosen = [*itertools.chain.from_iterable(itertools.combinations(range(count), 2))]
  pos = _positives(views, chosen, similarity)
  return Pairs(pos.reshape(-1, count - 1), *_masked_by_view(neg, axis_name))


def across_views(*views: jax.Array, axis_name: str | None = None, similarity: str = 'cosine') -> Pairs:
  """Contrasts each ordered pair of views separately (CMC, Tian et al. 2019, Eq. 8).

  For each pair (x, y), in the order of `itertools.permutations`, the positive of an instance's view x is its view y,
  and the negatives are the views y of all other instances: V(V - 1)·B queries with one positive each.

  >>> pos, neg, where = across_views(jnp.eye(4), jnp.eye(4), jnp.eye(4))
  >>> pos.shape, neg.shape, int(where[0].sum())
  ((24, 1), (24, 4), 3)
  """
  views, others = _gathered_views(views, axis_name, similarity)
  count = len(views)
  keys = [jnp.concatenate([others[:x], others[x + 1 :]]) for x in range(count)]
  neg = [_similarities_by_view(*given, similarity) for given in zip(views, keys, strict=True)]
  pos = jnp.moveaxis(_positives(views, range(count), similarity), 2, 1)
  return Pairs(pos.reshape(-1, 1), *_masked_by_view(jnp.concatenate(neg), axis_name))


def with_keys(
  query: jax.Array,
  key: jax.Array,
  queue: jax.Array | None = None,
  *,
  axis_name: str | None = None,
  similarity: str = 'cosine',
  block: int = 0,
  ring: bool = False,
) -> Pairs:
  """The keys of other instances are the negatives (MoCo v3; one direction of a symmetric loss).

  `query` is `[B, D]`, `key` `[B, D]` or, for K positives, `[B, K, D]`: views of the same instances, usually from two
  encoders. All K keys of every other instance are negatives, ordered by instance. A `queue` `[M, D]`, the same on every
  device, adds keys of earlier batches as negatives (cross-batch memory, Wang et al. 2020).

  >>> pos, neg, where = with_keys(jnp.eye(3), jnp.eye(3))
  >>> pos.shape, neg.shape, int(where[0].sum())
  ((3, 1), (3, 3), 2)
  """
  chex.assert_rank([query, key], [2, {2, 3}])
  key = key[:, None] if key.ndim == 2 else key
  count = key.shape[1]
  chex.assert_shape(key, (query.shape[0], count, query.shape[1]))
  query, key = _prepare(query, similarity), _prepare(key, similarity)
  check_sharding(query, axis_name)
  axis = _ring_axis(ring, axis_name, block)
  keys = gather(key, None if axis else axis_name)
  least = 2 if queue is None else 1
  own, instances = _instances(query.shape[0], _total(keys.shape[0], axis), axis_name, least)
  pos = _row_similarities(query[:, None], key, similarity)
  keys, instances = keys.reshape(-1, query.shape[1]), jnp.repeat(own if axis else instances, count)
  if queue is not None:
    _check_width('queue', queue, query)
    if ring:
      raise ValueError('ring = True takes no queue, because every device has the whole queue: leave one out')
    keys = jnp.concatenate([keys, _prepare(queue, similarity)])
    instances = jnp.concatenate([instances, jnp.full(len(queue), -1)])  # -1: a key of an earlier batch
  return Pairs(pos, *_negatives(query, keys, own, instances, similarity, block, axis_name=axis))


def with_queue(
  query: jax.Array,
  key: jax.Array,
  queue: jax.Array,
  *,
  in_batch: bool = False,
  axis_name: str | None = None,
  similarity: str = 'cosine',
  block: int = 0,
) -> Pairs:
  """The keys of earlier batches are the negatives (MoCo).

  `query` is `[B, D]`, `key` `[B, D]` or, for K positives, `[B, K, D]`, `queue` `[M, D]`, the same on every device.
  `in_batch` adds the other queries of all devices as negatives (CACR, Alg. 3, `with_intra_batch`).

  >>> pos, neg, where = with_queue(jnp.eye(3), jnp.eye(3), jnp.ones((5, 3)), in_batch=True)
  >>> pos.shape, neg.shape, int(where[0].sum())
  ((3, 1), (3, 8), 7)
  """
  chex.assert_rank([query, key], [2, {2, 3}])
  _check_width('queue', queue, query)
  key = key[:, None] if key.ndim == 2 else key
  chex.assert_shape(key, (query.shape[0], None, query.shape[1]))
  query, key, keys = (_prepare(x, similarity) for x in (query, key, queue))
  check_sharding(query, axis_name)
  own, instances = jnp.arange(query.shape[0]), jnp.full(keys.shape[0], -1)  # -1: a key of an earlier batch
  if in_batch:
    queries = gather(query, axis_name)
    own, others = _instances(query.shape[0], queries.shape[0], axis_name, least=1)
    keys, instances = jnp.concatenate([keys, queries]), jnp.concatenate([instances, others])
  pos = _row_similarities(query[:, None], key, similarity)
  return Pairs(pos, *_negatives(query, keys, own, instances, similarity, block))


def with_bank(
  query: jax.Array,
  bank: jax.Array,
  index: jax.Array,
  negatives: jax.Array | None = None,
  *,
  similarity: str = 'cosine',
  block: int = 0,
) -> Pairs:
  """The entries of a memory bank are the keys (Wu et al. 2018; Wang & Liu 2021, sec. 5.1).

  `bank` `[N, D]`, the same on every device, has one entry per training example. Query b belongs to the example
  `index[b]`, whose entry is its positive. The negatives are all other entries, or those listed in `negatives`: integers
  `[M]` for all queries, or `[B, M]` for each query. The query's own entry is never a negative.

  >>> pos, neg, where = with_bank(jnp.eye(2), jnp.eye(4, 2), index=jnp.array([3, 0]))
  >>> pos.shape, neg.shape, where.tolist()
  ((2, 1), (2, 4), [[True, True, True, False], [False, True, True, True]])
  """
  chex.assert_rank([query, index], [2, 1])
  check_sharding(query, None)
  _check_width('bank', bank, query)
  chex.assert_equal_shape_prefix([query, index], 1)
  bank = jnp.asarray(bank)
  _check_entries('index', index, bank.shape[0])
  if negatives is None:
    keys, entries = bank, jnp.arange(bank.shape[0])
  else:
    chex.assert_rank(negatives, {1, 2})
    _check_entries('negatives', negatives, bank.shape[0])
    keys, entries = bank[negatives], negatives
  query, own, keys = (_prepare(x, similarity) for x in (query, bank[index], keys))
  pos = _row_similarities(query, own, similarity)[:, None]
  if keys.ndim == 2:
    return Pairs(pos, *_negatives(query, keys, index, entries, similarity, block))
  if block:
    raise ValueError(f'block = {block} needs negatives that all queries share: give shape [M], not {entries.shape}')
  return Pairs(pos, *_masked(_row_similarities(query[:, None], keys, similarity), entries != index[:, None]))


def _check_width(name: str, keys: jax.Array, query: jax.Array) -> None:
  """Raises a ValueError unless `keys` is [M, D]: jax would broadcast keys of another width, or fail later."""
  if np.ndim(keys) != 2 or np.shape(keys)[1] != query.shape[1]:
    raise ValueError(
      f'{name} has shape {np.shape(keys)}, but the queries have {query.shape[1]} features: give [M, {query.shape[1]}]'
    )


def _check_entries(name: str, entries: jax.Array, size: int) -> None:
  """Raises a ValueError unless all entries are indices of the bank. jax would clamp or wrap others without an error."""
  if not isinstance(entries, jax.core.Tracer):
    found = np.asarray(entries)
    if len(wrong := found[(found < 0) | (found >= size)]):
      raise ValueError(f'{name} has the entry {wrong[0]}, but the bank has {size}: give numbers from 0 to {size - 1}')


def check_block(block: int) -> None:
  """Raises a ValueError unless `block` is an integer of at least 0.

  >>> check_block(1024)
  """
  require('block', block, lambda n: is_whole(n) and n >= 0, 'a number of queries, or 0 for all at once')


def check_similarity(similarity: str) -> None:
  """Raises a ValueError unless `similarity` is known.

  >>> check_similarity('dot')
  """
  require_choice('similarity', similarity, ('cosine', 'dot', 'euclidean'))


def check_ring(ring: bool, block: int) -> None:
  """Raises a ValueError if `ring` is set without a `block`.

  >>> check_ring(True, block=1024)
  """
  require('ring', ring, lambda ring: block or not ring, 'False without a block: set block above 0')


def _ring_axis(ring: bool, axis_name: str | None, block: int) -> str | None:
  """The mapped axis along which keys are passed; None without a ring."""
  check_ring(ring, block)
  return axis_name if ring else None


def _total(count: int, axis_name: str | None) -> int:
  return count if axis_name is None else count * jax.lax.axis_size(axis_name)


def _prepare(x: jax.Array, similarity: str) -> jax.Array:
  check_similarity(similarity)
  return normalize(x) if similarity == 'cosine' else to_float32(x)


def gather(x: jax.Array, axis_name: str | None, axis: int = 0) -> jax.Array:
  """The examples of all devices, concatenated along an axis in the order of the global batch.  [B, ...] -> [N, ...]

  >>> gather(jnp.ones((2, 3)), None).shape
  (2, 3)
  """
  check_sharding(x, axis_name)
  return x if axis_name is None else jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)


def _gathered_views(views, axis_name: str | None, similarity: str) -> tuple[jax.Array, jax.Array]:
  """The views [V, B, D] of this device and [V, N, D] of all devices."""
  if len(views) < 2:
    raise ValueError(f'views = {len(views)} cannot be contrasted: give at least 2 as separate arguments, each [B, D]')
  chex.assert_rank(views, 2)
  chex.assert_equal_shape(views)
  check_sharding(jnp.asarray(views[0]), axis_name)
  stacked = _prepare(jnp.stack(views), similarity)
  return stacked, gather(stacked, axis_name, axis=1)


def _instances(batch: int, total: int, axis_name: str | None, least: int = 2) -> tuple[jax.Array, jax.Array]:
  """The positions in the global batch of the instances of this device, [B], and of all devices, [N]."""
  if total < least:
    raise ValueError(f'batch = {total} instance leaves no negatives: give at least 2')
  first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * batch
  return first + jnp.arange(batch), jnp.arange(total)


def not_own(batch: int, total: int, axis_name: str | None, least: int = 2) -> jax.Array:
  """bool [B, N], False where the key belongs to the query's own instance.

  `least` is the smallest allowed number of instances on all devices.

  >>> not_own(2, 2, None).tolist()
  [[False, True], [True, False]]
  """
  own, instances = _instances(batch, total, axis_name, least)
  return own[:, None] != instances[None]


def _negatives(
  queries: jax.Array,
  keys: jax.Array,
  own: jax.Array,
  instances: jax.Array,
  similarity: str,
  block: int,
  *,
  symmetric: bool = False,
  axis_name: str | None = None,
) -> tuple[jax.Array | NegativeBlocks, jax.Array | None]:
  """The `neg` and `where` of `Pairs`: keys [M, D] whose `instances` [M] differ from the query's `own` [Q]."""
  check_block(block)
  if not len(keys):
    raise ValueError(f'keys have shape {keys.shape}, so no query has a negative: give at least one key')
  if block:
    return NegativeBlocks(queries, keys, own, instances, similarity, block, symmetric, axis_name), None
  return _masked(_similarities(queries, keys, similarity), own[:, None] != instances[None])


def _masked(neg: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`neg` with -inf where `where` is False, so that it contains its mask; and the mask."""
  return jnp.where(where, neg, -jnp.inf), where


def _positives(views: jax.Array, chosen: Sequence[int], similarity: str) -> jax.Array:
  """[V, B, D], n views -> [n, B, V - 1], the similarities of each chosen view with the other views of the instance."""
  count, batch, _ = views.shape
  ordered = {pair: place for place, pair in enumerate(itertools.combinations(range(count), 2))}
  by_first = [_row_similarities(views[x : x + 1], views[x + 1 :], similarity) for x in range(count - 1)]
  of_pair = jnp.concatenate(by_first)
  places = np.array([ordered[min(v, w), max(v, w)] for v in chosen for w in range(count) if w != v])
  # Selected by a product, so that the gradient is a product and not a scatter.
  selected = jnp.matmul(jax.nn.one_hot(places, len(ordered), dtype=of_pair.dtype), of_pair, precision='highest')
  return jnp.moveaxis(selected.reshape(len(chosen), count - 1, batch), 1, 2)


def _similarities_by_view(queries: jax.Array, keys: jax.Array, similarity: str) -> jax.Array:
  """[B, D], [V, N, D] -> [V, B, N]"""
  count, total, width = keys.shape
  found = _similarities(queries, keys.reshape(count * total, width), similarity)
  return jnp.moveaxis(found.reshape(-1, count, total), 1, 0)


def _masked_by_view(neg: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
  """The `neg` and `where` of `Pairs` for similarities [n, B, N], each with the keys of one view."""
  count, batch, total = neg.shape
  where = jnp.tile(not_own(batch, total, axis_name), (count, 1))
  return _masked(neg.reshape(count * batch, total), where)


def _similarities(queries: jax.Array, keys: jax.Array, similarity: str) -> jax.Array:
  """[Q, D], [M, D] -> [Q, M]"""
  # Accelerators multiply float32 in lower precision by default: at tau = 0.01 the error would be as large as the loss.
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  if similarity != 'euclidean':
    return product(queries, keys.T)
  # Moving the origin to the mean key keeps the distances and reduces rounding errors.
  origin = jax.lax.stop_gradient(jnp.mean(keys, axis=0, keepdims=True))
  queries, keys = queries - origin, keys - origin
  squares = jnp.sum(queries * queries, axis=1)[:, None] + jnp.sum(keys * keys, axis=1)[None]
  return -_safe_sqrt(squares - 2 * product(queries, keys.T))


def _row_similarities(x: jax.Array, y: jax.Array, similarity: str) -> jax.Array:
  """[..., D], [..., D] -> [...]"""
  if similarity != 'euclidean':
    return jnp.sum(x * y, axis=-1)
  return -_safe_sqrt(jnp.sum((x - y) ** 2, axis=-1))


def _safe_sqrt(square: jax.Array) -> jax.Array:
  """The square root, with value and gradient 0 where the square is 0 up to rounding."""
  tiny = square < 1e-24
  return jnp.where(tiny, 0, jnp.sqrt(jnp.where(tiny, 1, square)))
