"""Measures that need labels, and the bounds of the balanced objective (Lee 2025)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.typing import ArrayLike

from ssl_jax.arrays import normalize
from ssl_jax.evals import check, row_blocks
from ssl_jax.registry import require_positive


@functools.partial(jax.jit, static_argnames=('num_classes', 'block'))
def _class_sums(x, labels, *, num_classes, block):
  """The sum of the features of each class. Unlike a scatter, it adds in a fixed order.  [n, d], [n] -> [classes, d]"""
  n, d = x.shape
  starts = jnp.arange(-(-n // block)) * block

  def add(total, start):
    # The last block starts earlier, to stay inside the array: rows already counted get no class.
    first = jnp.minimum(start, n - block)
    counted = first + jnp.arange(block) < start
    labels_ = jnp.where(counted, -1, jax.lax.dynamic_slice_in_dim(labels, first, block))
    member = jax.nn.one_hot(labels_, num_classes, axis=0)
    return total + row_blocks.similarities(member, jax.lax.dynamic_slice_in_dim(x, first, block).T), None

  return jax.lax.scan(add, jnp.zeros((num_classes, d)), starts)[0]


def _class_means(x, labels):
  """Means of the classes that occur, renumbered from 0.  [n, d], [n] -> [c, d], class of each row [n], counts [c]"""
  _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
  labels = labels.astype(np.int32)
  size = row_blocks.rows(len(x), max(len(counts), x.shape[1]))
  sums = _class_sums(x, jnp.asarray(labels), num_classes=len(counts), block=size)
  return sums / jnp.asarray(counts, jnp.float32)[:, None], labels, counts


def _same_label_sum(x, labels):
  """Sum of the similarities of all ordered same-label pairs, Σ_c ‖Σ x‖² − Σ‖x‖², and the number of these pairs."""
  x = check.features('features', x)
  labels = check.labels('labels', labels, len(x), classes=1)
  x = normalize(x)
  means, labels, counts = _class_means(x, labels)
  several = counts > 1  # the others have no pairs, and their rounding errors would remain
  squares = np.sum(np.square(np.asarray(means, np.float64)), axis=1)
  own = np.square(np.asarray(jnp.linalg.norm(x, axis=1), np.float64))
  total = np.sum((counts**2 * squares)[several]) - np.sum(own[several[labels]])
  return float(total), int(np.sum(counts * (counts - 1)))


def tolerance(x: ArrayLike, labels: ArrayLike) -> float:
  """E[s · same label] over all pairs (Wang & Liu 2021 Eq. 11); decreases with the number of classes. Takes O(n d)."""
  total, _ = _same_label_sum(x, labels)
  n = np.size(labels)
  if n < 2:
    raise ValueError(f'features: {n} example, expected at least 2 to have a pair')
  return total / (n * (n - 1))


def same_label_similarity(x: ArrayLike, labels: ArrayLike) -> float:
  """Mean similarity of same-label pairs: "tolerance" in Wang & Liu 2021 Table 1 and the DySTreSS code. Takes O(n d)."""
  total, pairs = _same_label_sum(x, labels)
  if not pairs:
    raise ValueError('labels: no class has two examples, so there is no same-label pair')
  return total / pairs


def inter_class_uniformity(x: ArrayLike, labels: ArrayLike, *, t: float = 2.0) -> float:
  """log E exp(−t‖μ − μ′‖²) over pairs of class centroids, each the mean of unit features (DySTreSS Eq. 18)."""
  require_positive(t=t)
  x = check.features('features', x)
  means, _, counts = _class_means(normalize(x), check.labels('labels', labels, len(x)))
  means = np.asarray(means, np.float64)
  squares = np.sum(means**2, axis=1)
  distances = np.maximum(squares[:, None] + squares[None, :] - 2 * means @ means.T, 0)
  exponents = -t * distances[~np.eye(len(counts), dtype=bool)]
  return float(scipy.special.logsumexp(exponents)) - math.log(len(exponents))


def prototype_bias(views: ArrayLike, labels: ArrayLike) -> float:
  """Prototype representation bias: E‖μ_y − μ̃‖, μ̃ the mean of an image's views, μ_y of its class (Lee 2025 Eq. 16)."""
  views = check.views('views', views)
  labels = check.labels('labels', labels, views.shape[1], classes=1)
  surrogate = normalize(views).mean(axis=0)
  means, labels, _ = _class_means(surrogate, labels)
  return row_blocks.mean(jnp.linalg.norm(means[jnp.asarray(labels)] - surrogate, axis=1))


def prototype_bias_sampled(views: ArrayLike, partners: ArrayLike) -> float:
  """The paper's estimate of `prototype_bias`: E‖f(t(x′)) − f(t(x))‖, the same t and class for both (Lee 2025 Eq. 51).

  Args:
    views: f(t(x)) for several t, [v, n, d].
    partners: f(t(x′)) for the same t, where x′ has the class of x, [v, n, d]. x′ may be x, as in a draw from X|y.
  """
  views, partners = check.views('views', views), check.views('partners', partners)
  if views.shape != partners.shape:
    raise ValueError(f'partners: shape {partners.shape}, expected {views.shape}, that of the views')
  return row_blocks.mean(jnp.linalg.norm(normalize(partners) - normalize(views), axis=2))


def same_label_partners(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """For each example a uniformly drawn example of its class, which may be itself.  labels [n] -> indices [n]"""
  _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
  members = np.argsort(inverse, kind='stable')
  first = np.cumsum(counts) - counts
  return members[first[inverse] + rng.integers(counts[inverse])]


# Bounds of the balanced objective (Lee 2025)


@jax.jit
def _attracting_gap(query, views):
  query, prototype = normalize(query), normalize(views).mean(axis=0)
  # RHS − LHS = −E s(q, f(T)) + s(q, E f(T))
  return jnp.sum(query * normalize(prototype), axis=1) - jnp.sum(query * prototype, axis=1)


def attracting_gap(query: ArrayLike, views: ArrayLike) -> float:
  """Mean slack of the bound −s(f(t(x)), E f(T(x))) ≤ −E s(f(t(x)), f(T(x))) (Lee 2025 Eq. 8; A.4.5: 10 views).

  Args:
    query: f(t(x)), [n, d].
    views: other views of the same images, which estimate E over T, [v, n, d].
  """
  query, views = check.features('query', query), check.views('views', views)
  if views.shape[1:] != query.shape:
    raise ValueError(f'views: shape {views.shape}, expected [views, {query.shape[0]}, {query.shape[1]}], as the query')
  return row_blocks.mean(_attracting_gap(query, views))


@functools.partial(jax.jit, static_argnames='block')
def _repelling_gap(query, query_class, bank, log_weight, prototypes, nu, alpha, *, block):
  bank, directions = normalize(bank), normalize(prototypes)

  def row(q, label):
    q = normalize(q)
    to_prototypes = row_blocks.similarities(q, directions)
    own = label[:, None] == jnp.arange(len(directions))[None, :]
    left = jnp.where(own, -jnp.inf, to_prototypes).max(axis=1)
    right = jax.nn.logsumexp(alpha * row_blocks.similarities(q, bank) + log_weight[None, :], axis=1) / (
      nu[label] * alpha
    )
    return right - left

  return row_blocks.map_rows(row, block, query, query_class)


def repelling_gap(
  query: ArrayLike,
  query_labels: ArrayLike,
  bank: ArrayLike,
  bank_labels: ArrayLike,
  *,
  alpha: float = 2.0,
  block: int | None = None,
) -> float:
  """Mean slack of the bound max s(f(t(x)), μ_y′) ≤ log E exp(α s)/(να) + log n/(να), y′ ≠ y (Lee 2025 Eq. 10; A.4.5).

  n E exp(α s) is computed as the sum of the class means (Eq. 46): the same on balanced classes, which Eq. 10 assumes,
  and still a bound on imbalanced ones.

  Args:
    query: f(t(x)), [q, d].
    bank: one view of every image, [n, d], for the prototypes μ_y, ν = min ‖μ_y′‖ and the expectation. The paper uses
      all 50,000 training images.
    alpha: 1 / temperature of the run.
  """
  require_positive(alpha=alpha)
  query, bank = check.features('query', query), check.features('bank', bank)
  check.same_width('query', query, 'bank', bank)
  bank_labels = check.labels('bank_labels', bank_labels, len(bank))
  query_labels = check.labels('query_labels', query_labels, len(query), classes=1)
  check.seen('query_labels', query_labels, 'bank_labels', bank_labels)
  prototypes, classes, counts = _class_means(normalize(bank), bank_labels)
  lengths = np.linalg.norm(np.asarray(prototypes), axis=1)
  # ν of a class is the smallest norm of the other prototypes: the second smallest for the class that has the smallest.
  smallest, second = np.sort(lengths)[:2]
  nu = np.where(np.arange(len(lengths)) == lengths.argmin(), second, smallest)
  return row_blocks.mean(
    _repelling_gap(
      query,
      jnp.asarray(np.searchsorted(np.unique(bank_labels), query_labels)),
      bank,
      jnp.asarray(-np.log(counts[classes]), jnp.float32),
      prototypes,
      jnp.asarray(nu, jnp.float32),
      alpha,
      block=block or row_blocks.rows(len(query), len(bank)),
    )
  )
