"""Similarities of an example to its negatives, and how a temperature weights them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ssl_jax import losses
from ssl_jax.arrays import normalize
from ssl_jax.evals import check, knn, row_blocks
from ssl_jax.registry import require_positive
from ssl_jax.temperature import Temperature, check_temperature


def _argument(temperature):
  """A temperature as a jit argument. A different number does not trigger recompilation; a different function does."""
  check_temperature(temperature)
  if callable(temperature):
    return jax.tree_util.Partial(temperature)
  return jnp.asarray(temperature, jnp.float32)


@functools.partial(jax.jit, static_argnames='block')
def _penalty_entropy(x, temperature, *, block):
  x, n = normalize(x), len(x)

  def row(query, index):
    return losses.penalty_entropy(row_blocks.similarities(query, x), temperature, row_blocks.others(index, n))

  return row_blocks.map_rows(row, block, x, jnp.arange(n))


def penalty_entropy(x: ArrayLike, temperature: Temperature, *, block: int | None = None) -> float:
  """Mean entropy of the relative penalties r ∝ exp(s/τ(s)) over the negatives (Wang & Liu 2021 Eq. 5, supplement).

  At most log(n − 1), reached if all negatives have the same weight.

  Args:
    temperature: a number or a function τ(s).
  """
  x = check.features('features', x)
  n = len(x)
  if n < 3:
    raise ValueError(f'features: {n} examples, expected at least 3 to have two negatives')
  return row_blocks.mean(_penalty_entropy(x, _argument(temperature), block=block or row_blocks.rows(n, n)))


@functools.partial(jax.jit, static_argnames='batch')
def _conditional_entropy(x, t_neg, *, batch):
  n = len(x) // batch * batch
  x = normalize(x[:n]).reshape(-1, batch, x.shape[1])
  where = row_blocks.others(jnp.arange(batch), batch)
  # ‖x − x⁻‖² = 2 − 2s: π⁻ is the penalty distribution of temperature 1 / (2 t⁻).
  return jax.lax.map(lambda z: losses.penalty_entropy(row_blocks.similarities(z, z), 0.5 / t_neg, where), x)


def conditional_entropy(x: ArrayLike, *, t_neg: float = 2.0, batch: int = 768) -> float:
  """Mean of H(X⁻|X) of π⁻ ∝ exp(−t⁻‖x − x⁻‖²) over mini-batches (CACR Eq. 4 and 8; Fig. 3); at most log(batch − 1).

  Args:
    x: shuffled features. Mini-batches are consecutive examples; an incomplete last one is dropped.
    t_neg: t⁻ of the run.
    batch: mini-batch size of the run: 768 in the paper's runs with one positive, 128 with four.
  """
  require_positive(t_neg=t_neg)
  x = check.features('features', x)
  if not 3 <= batch <= len(x):
    raise ValueError(f'batch = {batch} must be from 3 to {len(x)}, the number of examples')
  return row_blocks.mean(_conditional_entropy(x, t_neg, batch=batch))


@functools.partial(jax.jit, static_argnames=('k', 'block'))
def _local_separation(anchors, positives, *, k, block):
  positives, n = normalize(positives), len(anchors)

  def row(anchor, index):
    s = row_blocks.similarities(normalize(anchor), positives)
    own = jnp.take_along_axis(s, index[:, None], axis=1)
    return jnp.concatenate([own, knn.top_k(jnp.where(row_blocks.others(index, n), s, -jnp.inf), k)[0]], axis=1)

  return row_blocks.map_rows(row, block, anchors, jnp.arange(n))


def local_separation(anchors: ArrayLike, positives: ArrayLike, *, k: int = 10, block: int | None = None) -> np.ndarray:
  """Similarity of each example to its positive and to its k nearest negatives (Wang & Liu 2021, 5.2, Fig. 8).

  Args:
    anchors, positives: two views of the same images, [n, d] each; the negatives of anchor i are the positives j ≠ i.

  Returns:
    [n, 1 + k], the columns "pos", "n1", ..., "nk", whose means the figure plots.
  """
  anchors, positives = check.two('anchors', anchors, 'positives', positives)
  n = len(anchors)
  if not 1 <= k < n:
    raise ValueError(f'k = {k} must be from 1 to {n - 1}, the number of negatives of an example')
  return np.asarray(_local_separation(anchors, positives, k=k, block=block or row_blocks.rows(n, n)))


def _bins(s, bins):
  """The bin of [−1, 1] of each similarity; the last bin includes 1."""
  return jnp.clip(jnp.floor((s + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)


def _count(index, weights, bins):
  """Histogram of each row. The sum of integer weights does not depend on their order.  [q, n], [q, n] -> [q, bins]"""
  add = lambda i, w: jnp.zeros(bins, jnp.int32).at[i].add(w)
  return jax.vmap(add)(index, weights)


@functools.partial(jax.jit, static_argnames=('bins', 'block'))
def _similarity_histograms(anchors, positives, labels, *, bins, block):
  positives, n = normalize(positives), len(anchors)

  def row(anchor, label, index):
    same = label[:, None] == labels[None, :]
    group = jnp.where(row_blocks.others(index, n), jnp.where(same, 1, 2), 0)
    s = row_blocks.similarities(normalize(anchor), positives)
    return _count(group * bins + _bins(s, bins), jnp.ones_like(group), 3 * bins)

  return row_blocks.map_rows(row, block, anchors, labels, jnp.arange(n))


def similarity_histograms(
  anchors: ArrayLike, positives: ArrayLike, labels: ArrayLike, *, bins: int = 100, block: int | None = None
) -> dict[str, np.ndarray]:
  """Counts of the similarities of true positive, false negative and true negative pairs (DySTreSS Fig. 1).

  Args:
    anchors, positives: two views of the same images, [n, d] each. (i, i) is a true positive; (i, j) is a false
      negative if the labels are equal and a true negative otherwise.

  Returns:
    {'edges': [bins + 1] from −1 to 1, 'TP': [bins], 'FN': [bins], 'TN': [bins]}; the counts add up to n².
  """
  anchors, positives = check.two('anchors', anchors, 'positives', positives)
  n = len(anchors)
  labels = check.labels('labels', labels, n, classes=1)
  counts = _similarity_histograms(
    anchors, positives, jnp.asarray(labels), bins=bins, block=block or row_blocks.rows(n, max(n, 3 * bins))
  )
  counts = np.asarray(counts).sum(axis=0, dtype=np.int64).reshape(3, bins)
  return {'edges': np.linspace(-1, 1, bins + 1), **dict(zip(('TP', 'FN', 'TN'), counts, strict=True))}


@functools.partial(jax.jit, static_argnames=('bins', 'block'))
def _penalty_distribution(x, temperature, *, bins, block):
  x, n = normalize(x), len(x)

  def row(query, index):
    s = row_blocks.similarities(query, x)
    r = losses.penalties(s, temperature, row_blocks.others(index, n))
    # Fixed-point weights with unit 2⁻³⁰, because `_count` needs integers.
    return _count(_bins(s, bins), jnp.round(r * 2.0**30).astype(jnp.int32), bins)

  return row_blocks.map_rows(row, block, x, jnp.arange(n))


def penalty_distribution(
  x: ArrayLike, temperature: Temperature, *, bins: int = 100, block: int | None = None
) -> dict[str, np.ndarray]:
  """The share of the penalty r ∝ exp(s/τ(s)) in each bin of s, averaged over examples (Wang & Liu 2021 Fig. 3).

  Returns:
    {'edges': [bins + 1] from −1 to 1, 'penalty': [bins]}; the penalties add up to 1.
  """
  x = check.features('features', x)
  n = len(x)
  if n < 2:
    raise ValueError(f'features: {n} example, expected at least 2 to have a negative')
  block = block or row_blocks.rows(n, max(n, bins))
  shares = _penalty_distribution(x, _argument(temperature), bins=bins, block=block)
  return {
    'edges': np.linspace(-1, 1, bins + 1),
    'penalty': np.asarray(shares).mean(axis=0, dtype=np.float64) / 2**30,
  }
