"""Losses of two views without negatives: `loss(z1, z2, *, axis_name=None, ...) -> []`, embeddings `[B, D]`.

`emp_ssl` takes any number of views.

With `axis_name`, the statistics are those of the global batch, and the value is the same on every device. As in
`ssl_jax.pairs`, differentiate on each device, and average the gradients with `lax.pmean`. The result is the gradient of
the loss of the global batch, under `jax.pmap` and under `jax.shard_map(..., check_vma=False)`.

Everything is computed in float32, or in float64 for float64 embeddings.
"""

import chex
import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.arrays import check_sharding, normalize, to_float32
from ssl_jax.registry import require, require_choice, require_positive


def barlow_twins(z1: jax.Array, z2: jax.Array, *, lam: float = 0.0051, axis_name: str | None = None) -> jax.Array:
  """sum_i (1 - C_ii)² + lam · sum_{i≠j} C_ij² (Barlow Twins, Zbontar et al. 2021, Eq. 1-2).  [B, D] ×2 -> []

  C is the `[D, D]` correlation matrix, over the batch, between the features of the two views.

  >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
  >>> print(barlow_twins(z, z).round(3), barlow_twins(z, -z).round(3))
  0.0 8.0
  """
  require_positive(lam=lam)
  z1, z2 = _views(z1, z2, axis_name=axis_name)
  z1, z2 = (_center(z, axis_name) for z in (z1, z2))
  z1, z2 = (z * jax.lax.rsqrt(_mean(z * z, axis_name) + 1e-5) for z in (z1, z2))
  correlation = _covariance(z1, z2, axis_name)
  diagonal = _diagonal(correlation)
  return jnp.sum((1 - diagonal) ** 2) + lam * (jnp.sum(correlation**2) - jnp.sum(diagonal**2))


def vicreg(
  z1: jax.Array,
  z2: jax.Array,
  *,
  invariance: float = 25.0,
  variance: float = 25.0,
  covariance: float = 1.0,
  axis_name: str | None = None,
) -> jax.Array:
  """invariance · s(Z, Z') + variance · (v(Z) + v(Z')) + covariance · (c(Z) + c(Z')) (VICReg, Bardes et al. 2022).

  As in Alg. 1, s is the mean over batch and features of (z - z')², v the mean over features of [1 - sqrt(Var + 1e-4)]₊,
  and c the sum of squared covariances of different features, divided by D. The authors' code halves v, as
  variance=12.5 does. Shapes: [B, D] ×2 -> [].

  >>> z = 2 * jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
  >>> print(vicreg(z, z), vicreg(z, -z))
  0.0 200.0
  """
  require_positive(invariance=invariance, variance=variance, covariance=covariance)
  z1, z2 = _views(z1, z2, axis_name=axis_name)
  size, dimension = _batch_size(z1, axis_name), z1.shape[1]
  loss = invariance * jnp.mean(_mean((z1 - z2) ** 2, axis_name))
  for z in (_center(z1, axis_name), _center(z2, axis_name)):
    matrix = _covariance(z, z, axis_name) * (size / (size - 1))
    variances = _diagonal(matrix)
    loss += variance * jnp.mean(jax.nn.relu(1 - jnp.sqrt(variances + 1e-4)))
    loss += covariance * (jnp.sum(matrix**2) - jnp.sum(variances**2)) / dimension
  return loss


def w_mse(z1: jax.Array, z2: jax.Array, *, eps: float = 0.0, axis_name: str | None = None) -> jax.Array:
  """E[2 - 2 cos(W z, W' z')], each view whitened over the batch (W-MSE, Ermolov et al. 2021).  [B, D] ×2 -> []

  W = L⁻¹ with L Lᵀ = (1 - eps) Σ + eps I, where Σ is the covariance of the view. The gradient flows through W. With
  the paper's eps of 0, the batch must have more than D examples and Σ full rank: constant features give NaN.

  >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
  >>> print(w_mse(z, z), w_mse(z, -z))
  0.0 4.0
  """
  require('eps', eps, lambda x: 0 <= x < 1, 'in [0, 1)')
  z1, z2 = _views(z1, z2, axis_name=axis_name)
  size, dimension = _batch_size(z1, axis_name), z1.shape[1]
  if eps == 0 and size <= dimension:
    raise ValueError(
      f'eps = {eps} needs more than {dimension} examples, the number of features, and there are {size}: raise eps'
    )

  def whiten(z):
    z = _center(z, axis_name)
    covariance = _covariance(z, z, axis_name) * (size / (size - 1))
    triangle = jnp.linalg.cholesky((1 - eps) * covariance + eps * jnp.eye(dimension, dtype=z.dtype))
    return normalize(jax.scipy.linalg.solve_triangular(triangle, z.T, lower=True).T)

  return 2 - 2 * jnp.sum(_mean(whiten(z1) * whiten(z2), axis_name))


def zero_cl(
  z1: jax.Array, z2: jax.Array, *, kind: str = 'both', eps: float = 0.01, axis_name: str | None = None
) -> jax.Array:
  """sum_i (1 - c_i)² after ZCA whitening (Zero-CL, Zhang et al. 2022).  [B, D] ×2 -> []

  - 'feature' (FCL): features are standardized and whitened over the batch; c_i is the correlation of feature i of one
    view with feature i of the other.
  - 'instance' (ICL): the same for the transposed matrix: instances are standardized and whitened over the features.
  - 'both': the sum of these two losses.

  The gradient through the whitening (Σ + eps I)^(-1/2) is stopped, as in the authors' code.

  >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
  >>> print(f"{zero_cl(z, z, kind='feature', eps=1e-6):.2f} {zero_cl(z, -z, kind='feature', eps=1e-6):.2f}")
  0.00 8.00
  """
  require_choice('kind', kind, ('instance', 'feature', 'both'))
  require_positive(eps=eps)
  z1, z2 = _views(z1, z2, axis_name=axis_name)
  loss = jnp.zeros((), z1.dtype)
  if kind in ('feature', 'both'):
    h1, h2 = (_whiten(_standardize(z, 1e-4, axis_name), eps, axis_name) for z in (z1, z2))
    loss += jnp.sum((1 - _mean(h1 * h2, axis_name)) ** 2)
  if kind in ('instance', 'both'):
    # Whitening mixes instances, so the instances of all devices are needed.
    h1, h2 = (_whiten(pairs.gather(_standardize(z.T, 1e-4, None), axis_name, axis=1), eps, None) for z in (z1, z2))
    loss += jnp.sum((1 - jnp.mean(h1 * h2, axis=0)) ** 2)
  return loss


def arb(z1: jax.Array, z2: jax.Array, *, groups: int = 1, eps: float = 1e-5, axis_name: str | None = None) -> jax.Array:
  """sum_i (1 - z1_i·b2_i / B)² + sum_i (1 - z2_i·b1_i / B)² (ARB, Zhang et al. 2022).  [B, D] ×2 -> []

  z_i `[B]` is a standardized feature. b is the orthogonal basis nearest to the D features of the view,
  Z (Zᵀ Z / B + eps I)^(-1/2), with its gradient stopped; eps is for batches of fewer than D examples. With `groups`
  above 1, each of that many equal groups of features has its own basis, which is cheaper.

  >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
  >>> print(f'{arb(z, z):.2f} {arb(z, -z):.2f}')
  0.07 13.93
  """
  require_positive(eps=eps)
  z1, z2 = _views(z1, z2, axis_name=axis_name)
  require('groups', groups, lambda x: x >= 1 and z1.shape[1] % x == 0, f'a divisor of D = {z1.shape[1]}')
  z1, z2 = (_standardize(z, 1e-5, axis_name) for z in (z1, z2))

  bases = [
    jax.lax.stop_gradient([_whiten(part, eps, axis_name) for part in jnp.split(z, groups, axis=1)]) for z in (z1, z2)
  ]
  first, second = (jnp.concatenate(base, axis=1) for base in bases)
  missed = lambda z, base: jnp.sum((1 - _mean(z * base, axis_name)) ** 2)
  return missed(z1, second) + missed(z2, first)


def emp_ssl(*views: jax.Array, invariance: float = 200.0, eps: float = 0.2, axis_name: str | None = None) -> jax.Array:
  """-mean_v R(Z_v) - invariance · mean_v,b cos(z_vb, z̄_b) (EMP-SSL, Tong et al. 2023).  [B, D] ×V -> []

  R(Z) = ½ log det(I + D / (B eps) Zᵀ Z) is the coding rate of unit vectors, which is large if they are diverse, and z̄
  is the mean of the views of an example. The paper has eps², the authors' code eps.

  >>> z = jnp.array([[1.0, 0.0], [0.0, 1.0]])
  >>> print(f'{emp_ssl(z, z, z, eps=1.0):.3f} {emp_ssl(z, -z, eps=1.0):.3f}')
  -200.693 -0.693
  """
  require_positive(invariance=invariance, eps=eps)
  z = normalize(jnp.stack(_views(*views, axis_name=axis_name)))
  size, dimension = _batch_size(z[0], axis_name), z.shape[2]
  few = size <= dimension  # then Z Zᵀ is smaller than Zᵀ Z, and det(I + c Z Zᵀ) = det(I + c Zᵀ Z)
  if few:
    z, axis_name = pairs.gather(z, axis_name, axis=1), None

  def rate(z):
    moments = _covariance(z.T, z.T, None) * dimension / size if few else _covariance(z, z, axis_name)
    triangle = jnp.linalg.cholesky(jnp.eye(len(moments), dtype=z.dtype) + dimension / eps * moments)
    return jnp.sum(jnp.log(_diagonal(triangle)))

  # No jax.vmap: batched products can deadlock on a CPU that is split into several devices (jax 0.10).
  rates = jnp.stack([rate(view) for view in z])
  # The mean over the views of cos(z_v, z̄) is the length of z̄.
  center = jnp.mean(z, axis=0)
  alignment = jnp.sum(_mean(center * normalize(center), axis_name))
  return -jnp.mean(rates) - invariance * alignment


def _views(*views: jax.Array, axis_name: str | None) -> list[jax.Array]:
  chex.assert_rank(views, 2)
  chex.assert_equal_shape(views)
  if len(views) < 2:
    raise ValueError(f'views = {len(views)} cannot be compared: give at least 2')
  check_sharding(views[0], axis_name)
  if (size := _batch_size(views[0], axis_name)) < 2:
    raise ValueError(f'batch = {size} example has no variance: give at least 2')
  return [to_float32(z) for z in views]


def _batch_size(z: jax.Array, axis_name: str | None) -> int:
  return z.shape[0] * (1 if axis_name is None else jax.lax.psum(1, axis_name))


def _mean(z: jax.Array, axis_name: str | None) -> jax.Array:
  """The mean over the examples of all devices.  [B, D] -> [1, D]"""
  mean = jnp.mean(z, axis=0, keepdims=True)
  return mean if axis_name is None else jax.lax.pmean(mean, axis_name)


def _center(z: jax.Array, axis_name: str | None) -> jax.Array:
  return z - _mean(z, axis_name)


def _covariance(z1: jax.Array, z2: jax.Array, axis_name: str | None) -> jax.Array:
  """The mean outer product of the rows of z1 and z2: their covariance, if they are centered.  [B, D] ×2 -> [D, D]"""
  covariance = jnp.matmul(z1.T, z2, precision=jax.lax.Precision.HIGHEST) / z1.shape[0]
  return covariance if axis_name is None else jax.lax.pmean(covariance, axis_name)


def _diagonal(matrix: jax.Array) -> jax.Array:
  """The diagonal. The gradient of `jnp.diagonal` is a scatter, which is slow with deterministic operations on a GPU."""
  return jnp.sum(jnp.where(jnp.eye(len(matrix), dtype=bool), matrix, 0), axis=1)


def _standardize(z: jax.Array, eps: float, axis_name: str | None) -> jax.Array:
  """Mean 0 and standard deviation 1 over the examples, up to eps.  [B, D] -> [B, D]"""
  z = _center(z, axis_name)
  size = _batch_size(z, axis_name)
  variance = _mean(z * z, axis_name) * (size / (size - 1))
  # 1e-12 keeps the gradient of the square root finite for constant features.
  return z / (jnp.sqrt(variance + 1e-12) + eps)


def _whiten(z: jax.Array, eps: float, axis_name: str | None) -> jax.Array:
  """z (Σ + eps I)^(-1/2), with no gradient through Σ, the covariance over the examples.  [B, D] -> [B, D]"""
  values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(_covariance(z, z, axis_name)))
  # Rounding can make the smallest eigenvalues negative.
  roots = jax.lax.rsqrt(jnp.maximum(values, 0) + eps)
  matrix = jnp.matmul(vectors * roots[None], vectors.T, precision=jax.lax.Precision.HIGHEST)
  return jnp.matmul(z, matrix, precision=jax.lax.Precision.HIGHEST)
