"""Alignment, uniformity, the gap between modalities, and spectra of features that are not normalized."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.typing import ArrayLike

from ssl_jax.arrays import normalize
from ssl_jax.evals import check, row_blocks
from ssl_jax.registry import require_positive


@jax.jit
def _modality_gap(x, y):
  return jnp.linalg.norm(normalize(x).mean(axis=0) - normalize(y).mean(axis=0))


def modality_gap(x: ArrayLike, y: ArrayLike) -> float:
  """‖E[x] − E[y]‖ of two modalities, such as images and their texts (Liang et al. 2022).  [n, d], [n, d] -> float"""
  return float(_modality_gap(*check.two('x', x, 'y', y)))


@functools.partial(jax.jit, static_argnames='block')
def _uniformity(x, t, *, block):
  x, n = normalize(x), len(x)
  squares = jnp.sum(x * x, axis=1)  # 1, or 0 if all features of an example are 0

  def row(query, index):
    own = jnp.sum(query * query, axis=1, keepdims=True)
    kernel = jnp.exp(t * (2 * row_blocks.similarities(query, x) - own - squares[None]))
    return jnp.where(row_blocks.others(index, n), kernel, 0.0).sum(axis=1)

  return row_blocks.map_rows(row, block, x, jnp.arange(n))


def uniformity(x: ArrayLike, *, t: float = 2.0, block: int | None = None) -> float:
  """log E exp(−t‖x − y‖²) over pairs (DySTreSS Eq. 16; Wang & Liu 2021 Eq. 10, who plot its negative)."""
  require_positive(t=t)
  x = check.features('features', x)
  n = len(x)
  if n < 2:
    raise ValueError(f'features: {n} example, expected at least 2 to have a pair')
  mean = row_blocks.mean(_uniformity(x, t, block=block or row_blocks.rows(n, n))) / (n - 1)
  return math.log(mean) if mean else -math.inf  # for a large t, it underflows


@jax.jit
def _alignment(views):
  views = normalize(views)
  return jnp.square(views - views.mean(axis=0, keepdims=True)).sum(axis=(0, 2)) * (2 / (len(views) - 1))


def alignment(views: ArrayLike) -> float:
  """E‖x − x⁺‖² over pairs of views of an image: twice the variance of its views (DySTreSS Eq. 17)."""
  views = check.views('views', views)
  if len(views) < 2:
    raise ValueError(f'views: {len(views)} view, expected at least 2 to have a positive pair')
  return row_blocks.mean(_alignment(views))


def _effective_rank(values, epsilon) -> float:
  """exp of the entropy of p = values / Σ values + epsilon; 0 if all values are 0."""
  if not values.any():
    return 0.0
  p = values / values.sum() + epsilon
  return float(np.exp(-np.sum(p * np.log(p))))


@jax.jit
def _singular_values(x):
  """Singular values of x, computed from R in x = QR if n > d: as accurate, and much faster if n ≫ d."""
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
  # Smaller eigenvalues are float32 noise, which grows with d and with the square root of n.
  noise = np.finfo(np.float32).eps * (min(x.shape) + 2 * np.sqrt(len(x)))
  rank = int(np.sum(eigenvalues > eigenvalues.max() * noise**2))
  i = np.arange(ranks[0], min(ranks[1], rank) + 1)
  if len(i) < 2:
    raise ValueError(f'ranks = {ranks} must include two eigenvalues, but the covariance has rank {rank}: lower them')
  slope, _ = np.polyfit(np.log(i), np.log(eigenvalues[i - 1]), 1, w=1 / np.sqrt(i))
  return float(-slope)


def lidar(views: ArrayLike, *, delta: float = 1e-4) -> float:
  """LiDAR: the effective rank of Σ_w^−½ Σ_b Σ_w^−½, each image being a class of its views (Thilak et al. 2023).

  Σ_b is the covariance of the image means over views, Σ_w that of the views around these means plus δI. The paper uses
  1,000 images with 50 views.
  """
  views = check.views('views', views)
  if views.shape[0] < 2 or views.shape[1] < 2:
    raise ValueError(f'views: shape {views.shape}, expected at least 2 views of at least 2 examples')
  # In float32, the covariance of features with a large norm may not be positive definite.
  views = np.asarray(views, np.float64)
  centre = views.mean(axis=0)
  within = (views - centre[None]).reshape(-1, views.shape[-1])
  root = scipy.linalg.cholesky(within.T @ within / len(within) + delta * np.eye(within.shape[1]), lower=True)
  whitened = scipy.linalg.solve_triangular(root, (centre - centre.mean(axis=0, keepdims=True)).T, lower=True)  # [d, n]
  d, n = whitened.shape
  eigenvalues = np.zeros(d)  # of whitened whitenedᵀ / n, computed from the smaller Gram matrix
  eigenvalues[: min(n, d)] = scipy.linalg.eigvalsh(whitened.T @ whitened if n < d else whitened @ whitened.T) / n
  return _effective_rank(np.maximum(eigenvalues, 0), 1e-8)
