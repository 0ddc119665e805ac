"""Measures of a representation, from features (and labels) alone.

Shapes: features [n, d]; views [v, n, d], v augmented views of the same n images; labels [n], integers. Features are
L2-normalised first, as in the papers, unless a docstring says otherwise. A pair is two different examples: no example
is compared with itself. Pairwise measures are computed in blocks of rows and averaged in float64, and nothing is summed
in an order that changes from call to call.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.typing import ArrayLike

from ssl_jax import losses
from ssl_jax.arrays import normalize
from ssl_jax.evals import check, knn, row_blocks
from ssl_jax.temperature import Temperature


def _views(name, x):
  """Views [v, n, d] in float32, or ValueError."""
  if np.ndim(x) != 3 or 0 in np.shape(x):
    raise ValueError(f'{name}: shape {np.shape(x)}, expected [views, examples, dimensions]')
  v, n, d = np.shape(x)
  return check.features(name, jnp.reshape(jnp.asarray(x, jnp.float32), (v * n, d))).reshape(v, n, d)


def _two(name, x, other_name, y):
  x, y = check.features(name, x), check.features(other_name, y)
  if x.shape != y.shape:
    raise ValueError(f'{other_name}: shape {y.shape}, expected {x.shape}, that of {name}')
  return x, y


def _mean(x) -> float:
  return float(np.mean(np.asarray(x), dtype=np.float64))


def _others(index, n):
  """Whether a column is another example than the row's own.  [q] -> bool [q, n]"""
  return index[:, None] != jnp.arange(n)[None, :]


# Alignment, uniformity and the gap between modalities


@jax.jit
def _modality_gap(x, y):
  return jnp.linalg.norm(normalize(x).mean(axis=0) - normalize(y).mean(axis=0))


def modality_gap(x: ArrayLike, y: ArrayLike) -> float:
  """‖E[x] − E[y]‖ of two modalities, such as images and their texts (Liang et al. 2022).  [n, d], [n, d] -> float"""
  return float(_modality_gap(*_two('x', x, 'y', y)))


@functools.partial(jax.jit, static_argnames='block')
def _uniformity(x, t, *, block):
  x, n = normalize(x), len(x)

  def row(query, index):
    kernel = jnp.exp(t * (2 * row_blocks.similarities(query, x) - 2))
    return jnp.where(_others(index, n), kernel, 0.0).sum(axis=1)

  return row_blocks.map_rows(row, block, x, jnp.arange(n))


def uniformity(x: ArrayLike, *, t: float = 2.0, block: int | None = None) -> float:
  """log E exp(−t‖x − y‖²) over pairs (DySTreSS Eq. 16; Wang & Liu 2021 Eq. 10, who plot its negative)."""
  x = check.features('features', x)
  n = len(x)
  if n < 2:
    raise ValueError(f'features: {n} example, expected at least 2 to have a pair')
  return math.log(_mean(_uniformity(x, t, block=block or row_blocks.rows(n, n))) / (n - 1))


@jax.jit
def _alignment(views):
  views = normalize(views)
  return jnp.square(views - views.mean(axis=0, keepdims=True)).sum(axis=(0, 2)) * (2 / (len(views) - 1))


def alignment(views: ArrayLike) -> float:
  """E‖x − x⁺‖² over pairs of views of an image: twice the variance of its views (DySTreSS Eq. 17)."""
  views = _views('views', views)
  if len(views) < 2:
    raise ValueError(f'views: {len(views)} view, expected at least 2 to have a positive pair')
  return _mean(_alignment(views))


# Classes


@functools.partial(jax.jit, static_argnames=('num_classes', 'block'))
def _class_sums(x, labels, *, num_classes, block):
  """Sums of the features of each class, in a fixed order, unlike a scatter.  [n, d], [n] -> [classes, d]"""
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
  """Classes that occur, renumbered from 0.  [n, d], [n] -> means [c, d], class of each row [n], counts [c]"""
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
  means, _, counts = _class_means(x, labels)
  squares = np.sum(np.square(np.asarray(means, np.float64)), axis=1)
  own = float(np.sum(np.square(np.asarray(jnp.linalg.norm(x, axis=1), np.float64))))
  return float(np.sum(counts**2 * squares)) - own, int(np.sum(counts * (counts - 1)))


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
  x = check.features('features', x)
  means, _, counts = _class_means(normalize(x), check.labels('labels', labels, len(x)))
  means = np.asarray(means, np.float64)
  squares = np.sum(means**2, axis=1)
  distances = np.maximum(squares[:, None] + squares[None, :] - 2 * means @ means.T, 0)
  classes = len(counts)
  return math.log((np.exp(-t * distances).sum() - np.exp(-t * np.diag(distances)).sum()) / (classes * (classes - 1)))


def prototype_bias(views: ArrayLike, labels: ArrayLike) -> float:
  """Prototype representation bias: E‖μ_y − μ̃‖, μ̃ the mean of an image's views, μ_y of its class (Lee 2025 Eq. 16)."""
  views = _views('views', views)
  labels = check.labels('labels', labels, views.shape[1], classes=1)
  surrogate = normalize(views).mean(axis=0)
  means, labels, _ = _class_means(surrogate, labels)
  return _mean(jnp.linalg.norm(means[jnp.asarray(labels)] - surrogate, axis=1))


def prototype_bias_sampled(views: ArrayLike, partners: ArrayLike) -> float:
  """The paper's estimate of `prototype_bias`: E‖f(t(x′)) − f(t(x))‖, the same t and class for both (Lee 2025 Eq. 51).

  Args:
    views: f(t(x)) for several t, [v, n, d].
    partners: f(t(x′)) for the same t, where x′ has the class of x, [v, n, d]. x′ may be x, as in a draw from X|y.
  """
  views, partners = _views('views', views), _views('partners', partners)
  if views.shape != partners.shape:
    raise ValueError(f'partners: shape {partners.shape}, expected {views.shape}, that of the views')
  return _mean(jnp.linalg.norm(normalize(partners) - normalize(views), axis=2))


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
  query, views = check.features('query', query), _views('views', views)
  if views.shape[1:] != query.shape:
    raise ValueError(f'views: shape {views.shape}, expected [views, {query.shape[0]}, {query.shape[1]}], as the query')
  return _mean(_attracting_gap(query, views))


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
    bank: one view of every image, [n, d], for the prototypes μ_y, ν = min ‖μ_y′‖ and the expectation. The paper has
      all 50,000 training images.
    alpha: 1 / temperature: that of the run.
  """
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
  return _mean(
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


# Negatives


def _argument(temperature):
  """A temperature as an argument of jit: another number needs no other program, another function does."""
  return jax.tree_util.Partial(temperature) if callable(temperature) else jnp.asarray(temperature, jnp.float32)


@functools.partial(jax.jit, static_argnames='block')
def _penalty_entropy(x, temperature, *, block):
  x, n = normalize(x), len(x)

  def row(query, index):
    return losses.penalty_entropy(row_blocks.similarities(query, x), temperature, _others(index, n))

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
  return _mean(_penalty_entropy(x, _argument(temperature), block=block or row_blocks.rows(n, n)))


@functools.partial(jax.jit, static_argnames='batch')
def _conditional_entropy(x, t_neg, *, batch):
  n = len(x) // batch * batch
  x = normalize(x[:n]).reshape(-1, batch, x.shape[1])
  where = _others(jnp.arange(batch), batch)
  # ‖x − x⁻‖² = 2 − 2s: π⁻ is the penalty distribution of temperature 1 / (2 t⁻).
  return jax.lax.map(lambda z: losses.penalty_entropy(row_blocks.similarities(z, z), 0.5 / t_neg, where), x)


def conditional_entropy(x: ArrayLike, *, t_neg: float = 2.0, batch: int = 768) -> float:
  """Mean of H(X⁻|X) of π⁻ ∝ exp(−t⁻‖x − x⁻‖²) over mini-batches (CACR Eq. 4 and 8; Fig. 3); at most log(batch − 1).

  Args:
    x: shuffled features; a mini-batch is consecutive examples, and an incomplete last one is dropped.
    t_neg: that of the run.
    batch: examples per mini-batch, that of the run: 768 in the paper's runs with one positive, 128 with four.
  """
  x = check.features('features', x)
  if not 3 <= batch <= len(x):
    raise ValueError(f'batch: {batch}, expected 3 to {len(x)}, the number of examples')
  return _mean(_conditional_entropy(x, t_neg, batch=batch))


@functools.partial(jax.jit, static_argnames=('k', 'block'))
def _local_separation(anchors, positives, *, k, block):
  positives, n = normalize(positives), len(anchors)

  def row(anchor, index):
    s = row_blocks.similarities(normalize(anchor), positives)
    own = jnp.take_along_axis(s, index[:, None], axis=1)
    return jnp.concatenate([own, knn.top_k(jnp.where(_others(index, n), s, -jnp.inf), k)[0]], axis=1)

  return row_blocks.map_rows(row, block, anchors, jnp.arange(n))


def local_separation(anchors: ArrayLike, positives: ArrayLike, *, k: int = 10, block: int | None = None) -> np.ndarray:
  """Similarity of each example to its positive and to its k nearest negatives (Wang & Liu 2021, 5.2, Fig. 8).

  Args:
    anchors, positives: two views of the same images, [n, d] each; the negatives of anchor i are the positives j ≠ i.

  Returns:
    [n, 1 + k], the columns "pos", "n1", ..., "nk", whose means the figure plots.
  """
  anchors, positives = _two('anchors', anchors, 'positives', positives)
  n = len(anchors)
  if not 1 <= k < n:
    raise ValueError(f'k: {k}, expected 1 to {n - 1}, the number of negatives of an example')
  return np.asarray(_local_separation(anchors, positives, k=k, block=block or row_blocks.rows(n, n)))


def _bins(s, bins):
  """The bin of [−1, 1] of each similarity; the last bin includes 1."""
  return jnp.clip(jnp.floor((s + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)


def _count(index, weights, bins):
  """Histogram of each row. Integer weights add up the same in any order.  [q, n], [q, n] -> [q, bins]"""
  add = lambda i, w: jnp.zeros(bins, jnp.int32).at[i].add(w)
  return jax.vmap(add)(index, weights)


@functools.partial(jax.jit, static_argnames=('bins', 'block'))
def _similarity_histograms(anchors, positives, labels, *, bins, block):
  positives, n = normalize(positives), len(anchors)

  def row(anchor, label, index):
    same = label[:, None] == labels[None, :]
    group = jnp.where(_others(index, n), jnp.where(same, 1, 2), 0)
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
  anchors, positives = _two('anchors', anchors, 'positives', positives)
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
    r = losses.penalties(s, temperature, _others(index, n))
    # Fixed point with unit 2⁻³⁰: see `_count`.
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


# Spectra of features that are not normalised


def _effective_rank(values, epsilon) -> float:
  """exp of the entropy of p = values / Σ values + epsilon; 0 if all values are 0."""
  if not values.any():
    return 0.0
  p = values / values.sum() + epsilon
  return float(np.exp(-np.sum(p * np.log(p))))


@jax.jit
def _singular_values(x):
  """Those of R in x = QR: as accurate as a decomposition of x, and much faster if n ≫ d."""
  return jnp.linalg.svd(jnp.linalg.qr(x, mode='r') if x.shape[0] > x.shape[1] else x, compute_uv=False)


def rankme(x: ArrayLike) -> float:
  """RankMe: exp of the entropy of the singular values, each divided by their sum (Garrido et al. 2023)."""
  return _effective_rank(np.asarray(_singular_values(check.features('features', x)), np.float64), 1e-7)


def alpha_req(x: ArrayLike, *, ranks: tuple[int, int] = (3, 100)) -> float:
  """α-ReQ: the exponent of the power law λ_i ∝ i^−α of the eigenvalues of the covariance (Agrawal et al. 2022).

  A line is fitted to (log i, log λ_i) for i in `ranks` (inclusive, up to the rank of the covariance), each point
  weighted by 1/i as in Stringer et al. (2019).
  """
  x = check.features('features', x)
  centred = x - x.mean(axis=0, keepdims=True)
  eigenvalues = np.square(np.asarray(_singular_values(centred), np.float64)) / max(len(x) - 1, 1)
  # Smaller eigenvalues are float32 noise.
  rank = int(np.sum(eigenvalues > eigenvalues.max() * (np.finfo(np.float32).eps * max(x.shape)) ** 2))
  i = np.arange(ranks[0], min(ranks[1], rank) + 1)
  if len(i) < 2:
    raise ValueError(
      f'ranks: {ranks}, but the covariance has rank {rank}; expected at least two eigenvalues in the range'
    )
  slope, _ = np.polyfit(np.log(i), np.log(eigenvalues[i - 1]), 1, w=1 / np.sqrt(i))
  return float(-slope)


def lidar(views: ArrayLike, *, delta: float = 1e-4) -> float:
  """LiDAR: the effective rank of Σ_w^−½ Σ_b Σ_w^−½, each image being a class of its views (Thilak et al. 2023).

  Σ_b is the covariance of the image means over views, Σ_w that of the views around these means plus δI. The paper uses
  1,000 images with 50 views.
  """
  views = _views('views', views)
  if views.shape[0] < 2 or views.shape[1] < 2:
    raise ValueError(f'views: shape {views.shape}, expected at least 2 views of at least 2 examples')
  # In float32, the covariance of features with a large norm is not positive definite.
  views = np.asarray(views, np.float64)
  centre = views.mean(axis=0)
  within = (views - centre[None]).reshape(-1, views.shape[-1])
  root = scipy.linalg.cholesky(within.T @ within / len(within) + delta * np.eye(within.shape[1]), lower=True)
  whitened = scipy.linalg.solve_triangular(root, (centre - centre.mean(axis=0, keepdims=True)).T, lower=True)  # [d, n]
  d, n = whitened.shape
  eigenvalues = np.zeros(d)  # of whitened whitenedᵀ / n, computed from the smaller Gram matrix
  eigenvalues[: min(n, d)] = scipy.linalg.eigvalsh(whitened.T @ whitened if n < d else whitened @ whitened.T) / n
  return _effective_rank(np.maximum(eigenvalues, 0), 1e-8)
