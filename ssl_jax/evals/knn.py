"""Exact k-nearest-neighbor classification on frozen features, in blocks of queries. One search serves all k.

Features are L2-normalized first, as in the DySTreSS code. Cosine similarity and L2 distance then give the same order,
so one search also serves the three voting rules of the papers.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ssl_jax.arrays import normalize
from ssl_jax.evals import check, row_blocks
from ssl_jax.evals.scoring import classes_before, percent
from ssl_jax.registry import is_whole, require, require_choice, require_positive

# Float32 rounding leaves about this squared distance between equal unit vectors; smaller distances are clipped to it.
SMALLEST_SQUARED_DISTANCE = 1e-6

VOTES = ('cosine', 'distance', 'majority')


def top_k(similarities: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Same as `lax.top_k`, but faster on long rows. Ties go to the lower index.  [q, n] -> values [q, k], indices [q, k]

  For k in the hundreds, accelerators sort whole rows. Here, the columns are split into groups of c adjacent ones. The k
  largest entries lie in the k groups with the largest maxima: these k maxima rank before any entry of another group. So
  two short rows are searched instead of a long one: n / c group maxima, then the k·c entries of the k best groups.
  c = sqrt(n / k) minimizes the total length.
  """
  chex.assert_rank(similarities, 2)
  queries, n = similarities.shape
  size = math.isqrt(n // k)
  if size < 2:
    return jax.lax.top_k(similarities, k)
  columns = -(-n // size) * size
  padded = jnp.pad(similarities, ((0, 0), (0, columns - n)), constant_values=-jnp.inf)
  grouped = padded.reshape(queries, columns // size, size)
  _, groups = jax.lax.top_k(grouped.max(axis=2), k)
  groups = jnp.sort(groups, axis=1)  # in the order of the bank, so that ties still go to the lower index
  candidates = jnp.take_along_axis(grouped, groups[:, :, None], axis=1).reshape(queries, k * size)
  values, position = jax.lax.top_k(candidates, k)
  return values, jnp.take_along_axis(groups, position // size, axis=1) * size + position % size


def _vote(similarities, labels, temperature, k, vote, num_classes):
  """Class scores for each k, from the max(k) nearest neighbors.  [q, max(k)], [q, max(k)] -> [q, len(k), classes]"""
  if vote == 'cosine':  # relative to the nearest: the same class order, without overflow at small temperatures
    weights = jnp.exp((similarities - similarities[:, :1]) / temperature)
  elif vote == 'distance':
    weights = jax.lax.rsqrt(jnp.maximum(2 - 2 * similarities, SMALLEST_SQUARED_DISTANCE))
  else:
    weights = jnp.ones_like(similarities)
  # A masked sum, not a scatter: on GPUs, a scatter adds in any order, so results would not be reproducible.
  votes = jnp.where(labels[:, :, None] == jnp.arange(num_classes)[None, None, :], weights[:, :, None], 0.0)
  parts = [votes[:, a:b].sum(axis=1) for a, b in itertools.pairwise((0, *k))]
  return jnp.cumsum(jnp.stack(parts, axis=1), axis=1)


@functools.partial(jax.jit, static_argnames=('k', 'block'))
def _neighbors(bank, queries, *, k, block):
  bank = normalize(bank)
  return row_blocks.map_rows(lambda x: top_k(row_blocks.similarities(normalize(x), bank), k), block, queries)


@functools.partial(jax.jit, static_argnames=('k', 'vote', 'num_classes', 'block'))
def _classify(bank, bank_labels, queries, temperature, *, k, vote, num_classes, block):
  bank = normalize(bank)

  def scores(rows):
    similarities, indices = top_k(row_blocks.similarities(normalize(rows), bank), k[-1])
    # Without the barrier, XLA fuses the search into the vote and, on a CPU, repeats it per class: three times as slow.
    similarities, labels = jax.lax.optimization_barrier((similarities, bank_labels[indices]))
    return _vote(similarities, labels, temperature, k, vote, num_classes)

  return row_blocks.map_rows(scores, block, queries)


def _inputs(bank, queries, k):
  """Makes the checks that `neighbors` and `classify` share. Returns the features on the device."""
  bank, queries = check.features('bank', bank), check.features('queries', queries)
  check.same_width('queries', queries, 'bank', bank)
  if not 1 <= k <= len(bank):
    raise ValueError(f'k = {k} must be from 1 to {len(bank)}, the number of examples in the bank')
  return bank, queries


def neighbors(
  bank: ArrayLike, queries: ArrayLike, k: int, *, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """The k nearest bank examples, nearest first.  [n, d], [q, d] -> indices [q, k], cosine similarities [q, k]"""
  bank, queries = _inputs(bank, queries, k)
  block = block or row_blocks.rows(len(queries), len(bank))
  similarities, indices = _neighbors(bank, queries, k=k, block=block)
  return np.asarray(indices), np.asarray(similarities)


def classify(
  bank: ArrayLike,
  bank_labels: ArrayLike,
  queries: ArrayLike,
  *,
  k: Sequence[int],
  vote: str = 'cosine',
  temperature: float = 0.1,
  num_classes: int | None = None,
  block: int | None = None,
) -> dict[int, np.ndarray]:
  """Class scores of each query for each k, from one search.  [n, d], [n], [q, d] -> {k: [q, num_classes]}

  The predicted class is the argmax; ties go to the lower class. A class without votes has score 0.

  Args:
    vote: the weight of a neighbor. 'cosine': exp(s / temperature), up to a factor per query (Wu et al. 2018; DySTreSS
      for balanced classes). 'distance': 1 / L2 distance, at most 1,000 for equal vectors (DySTreSS A.1, long tails).
      'majority': 1 (Lee 2025, A.4.2).
    num_classes: by default the largest label + 1.
    block: queries per block; by default as many as keep the similarities and the votes within 256 MiB each.
  """
  whole = lambda k: len(k) > 0 and all(is_whole(number) and number >= 1 for number in k)
  require('k', k, whole, 'a tuple of numbers of neighbors, such as (200,)')
  k = tuple(sorted(set(k)))
  require_choice('vote', vote, VOTES)
  require_positive(temperature=temperature)
  bank, queries = _inputs(bank, queries, k[-1])
  bank_labels = check.labels('bank_labels', bank_labels, len(bank))
  num_classes = num_classes or int(bank_labels.max()) + 1
  if num_classes <= bank_labels.max():
    raise ValueError(f'num_classes = {num_classes} must be above {bank_labels.max()}, the largest label of the bank')
  block = block or row_blocks.rows(len(queries), max(len(bank), k[-1] * num_classes))
  scores = _classify(
    bank, jnp.asarray(bank_labels), queries, temperature, k=k, vote=vote, num_classes=num_classes, block=block
  )
  found = {number: np.asarray(scores[:, i]) for i, number in enumerate(k)}
  for number, votes in found.items():
    check.finite(f'scores of {number} neighbors', votes, f'give another temperature than {temperature:g}')
  return found


def whitened(bank: ArrayLike, queries: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
  """Both arrays, normalized, then centered and whitened with the statistics of the bank.  [n, d], [q, d]

  Variances are treated as at least a thousandth of the largest, since directions with less are mostly noise.
  """
  bank, queries = (np.asarray(normalize(x)) for x in _inputs(bank, queries, 1))
  mean = bank.mean(axis=0, keepdims=True)
  bank, queries = bank - mean, queries - mean
  variances, axes = np.linalg.eigh(np.float64(bank.T @ bank / np.float32(len(bank))))
  scale = np.maximum(variances, max(1e-3 * variances[-1], 1e-12)) ** -0.5
  transform = np.float32(axes * scale[None, :])
  return bank @ transform, queries @ transform


def hits(scores: np.ndarray, labels: np.ndarray, topk: int) -> np.ndarray:
  """Whether each label is in the top `topk` and has a vote. Ties go to the lower class.  [q, c], [q] -> bool [q]"""
  return (classes_before(scores, labels) < topk) & (np.take_along_axis(scores, labels[:, None], axis=1)[:, 0] > 0)


def percentages(scores: Mapping[int, np.ndarray], labels: np.ndarray, topk: Sequence[int]) -> dict[str, float]:
  """The accuracies of the scores that `classify` returns, in percent: {'knn200': 84.1, 'knn200_top5': 98.9}"""
  return {
    f'knn{k}' + (f'_top{top}' if top > 1 else ''): percent(hits(score, labels, top))
    for k, score in scores.items()
    for top in topk
  }


def accuracy(
  bank_features: np.ndarray | jax.Array,
  bank_labels: ArrayLike,
  query_features: np.ndarray | jax.Array,
  query_labels: ArrayLike,
  *,
  k: Sequence[int] = (200,),
  vote: str = 'cosine',
  temperature: float = 0.1,
  topk: Sequence[int] = (1, 5),
) -> dict[str, float]:
  """kNN accuracy in percent: {'knn200': 84.1, 'knn200_top5': 98.9}; see `classify`."""
  bank_labels = check.labels('bank_labels', bank_labels, len(bank_features))
  labels = check.labels('query_labels', query_labels, len(query_features), classes=1)
  check.seen('query_labels', labels, 'bank_labels', bank_labels)
  scores = classify(bank_features, bank_labels, query_features, k=k, vote=vote, temperature=temperature)
  return percentages(scores, labels, topk)


def white_accuracy(
  bank_features: ArrayLike, bank_labels: ArrayLike, query_features: ArrayLike, query_labels: ArrayLike, **votes: Any
) -> dict[str, float]:
  """Top-1 `accuracy` on whitened features: {'knn200_white': 84.9}"""
  bank, queries = whitened(bank_features, query_features)
  found = accuracy(bank, bank_labels, queries, query_labels, topk=(1,), **votes)
  return {f'{name}_white': value for name, value in found.items()}
