"""Batch normalisation over the global batch, with torch's running statistics.

Statistics are float32 whatever the activations are. Under an `axis_name` the means of x and of x² are averaged over the
devices, so every device normalises with the statistics of the global batch; differentiating the local mean loss and
averaging the gradients over the devices then gives exactly the gradient of the global mean loss.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn


def wide(x):
  """x in float32, or in float64 where the compute is: a gradient is only checked well there."""
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _rows(x):
  """[..., C] -> [M, C]"""
  return x.reshape(-1, x.shape[-1])


def _sums_xla(a, b):
  """Σ a and Σ a·b over rows in float32.  [M, C], [M, C] -> [C], [C]"""
  a, b = wide(a), wide(b)
  return a.sum(0), (a * b).sum(0)


def _sums_dot(a, b, widest=128, chunks=256):
  """The same sums as matrix products with float32 accumulation.  [M, C], [M, C] -> [C], [C]

  Tensor cores read bf16 rows at memory speed where a reduction over columns does not: Σ a is a product with ones, Σ a·b
  the diagonal of aᵀb, taken in chunks of rows because its C × C result alone occupies too little of a GPU. The product
  costs C times the diagonal, so wide layers, whose activations are small, keep the plain reduction.
  """
  m, c = a.shape
  chunks = math.gcd(m, chunks)
  if c > widest or chunks == 1:
    return _sums_xla(a, b)
  precision = 'default' if a.dtype == jnp.bfloat16 else 'highest'  # no tf32 for float32
  dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide(a).dtype)
  # Eight equal rows of ones: a product with one row would be rewritten into the reduction that it replaces.
  total = dot('om,mc->oc', jnp.ones((8, m // chunks), a.dtype), a.reshape(m // chunks, chunks * c))[0]
  a, b = a.reshape(chunks, m // chunks, c), b.reshape(chunks, m // chunks, c)
  product = dot('kmc,kmd->kcd', a, b).sum(0)
  return total.reshape(chunks, c).sum(0), jnp.diagonal(product)


def _statistics(total, total_square, count, axis_name):
  """Mean and biased variance of the global batch from the local Σ x and Σ x²; [C], [C] -> [C], [C]"""
  mean, mean_square = total / count, total_square / count
  if axis_name is not None:
    mean, mean_square = jax.lax.pmean((mean, mean_square), axis_name)
  return mean, jnp.maximum(mean_square - jnp.square(mean), 0.0)


def _affine(x, mul, add):
  """x·mul + add in float32, in the dtype of x; [..., C], [C], [C] -> [..., C]"""
  mul, add = (v.reshape((1,) * (x.ndim - 1) + (-1,)) for v in (mul, add))
  return (wide(x) * mul + add).astype(x.dtype)


def _normalize_xla(x, scale, bias, epsilon, axis_name):
  """Batch norm, differentiated by JAX.  [..., C], [C], [C] -> [..., C] and the batch's mean and variance [C], [C]"""
  dtype, x = x.dtype, wide(x)  # once, so that the parts of its gradient meet before they are rounded
  rows = _rows(x)
  mean, var = _statistics(*_sums_xla(rows, rows), rows.shape[0], axis_name)
  mul = scale * jax.lax.rsqrt(var + epsilon)
  return _affine(x, mul, bias - mean * mul).astype(dtype), mean, var


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalize_dot(x, scale, bias, epsilon, axis_name):
  """The same, every sum by `_sums_dot`; the gradient does not flow through the returned mean and variance."""
  return _normalize_dot_fwd(x, scale, bias, epsilon, axis_name)[0]


def _normalize_dot_fwd(x, scale, bias, epsilon, axis_name):
  rows = _rows(x)
  mean, var = _statistics(*_sums_dot(rows, rows), rows.shape[0], axis_name)
  inv_std = jax.lax.rsqrt(var + epsilon)
  mul = scale * inv_std
  return (_affine(x, mul, bias - mean * mul), mean, var), (x, scale, mean, inv_std)


def _normalize_dot_bwd(epsilon, axis_name, residuals, cotangents):
  """dx = scale/σ · (dy − E[dy] − x̂·E[dy·x̂]) with expectations over the global batch (Ioffe & Szegedy 2015, sec. 3)."""
  del epsilon
  x, scale, mean, inv_std = residuals
  dy = cotangents[0]
  rows = _rows(x)
  dy_sum, dy_x_sum = _sums_dot(_rows(dy), rows)
  dscale = (dy_x_sum - mean * dy_sum) * inv_std  # Σ dy·x̂ of this device
  dy_mean, dy_xhat_mean = dy_sum / rows.shape[0], dscale / rows.shape[0]
  if axis_name is not None:
    dy_mean, dy_xhat_mean = jax.lax.pmean((dy_mean, dy_xhat_mean), axis_name)
  by_x = -dy_xhat_mean * inv_std
  mul, by_x, add = (v.reshape((1,) * (x.ndim - 1) + (-1,)) for v in (scale * inv_std, by_x, -dy_mean - by_x * mean))
  dx = mul * (wide(dy) + by_x * wide(x) + add)
  return dx.astype(x.dtype), dscale, dy_sum


_normalize_dot.defvjp(_normalize_dot_fwd, _normalize_dot_bwd)
_NORMALIZE = {'xla': _normalize_xla, 'dot': _normalize_dot}


class BatchNorm(nn.Module):
  """Batch norm over all axes but the last, in the dtype of its input; as torch.nn.BatchNorm1d and 2d.

  `momentum` is the share that the running statistics keep (torch's 0.1 is 0.9 here). As in torch the batch is
  normalised with its biased variance and the running variance takes the unbiased one.
  """

  axis_name: str | None = None
  affine: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  momentum: float = 0.9
  epsilon: float = 1e-5
  impl: str = 'xla'

  @nn.compact
  def __call__(self, x, train: bool):
    """[..., C] -> [..., C]"""
    chex.assert_rank(x, {2, 4})
    channels = (x.shape[-1],)
    if self.affine:
      scale, bias = self.param('scale', self.scale_init, channels), self.param('bias', nn.initializers.zeros, channels)
    else:
      scale, bias = jnp.ones(channels), jnp.zeros(channels)
    running_mean = self.variable('batch_stats', 'mean', jnp.zeros, channels)
    running_var = self.variable('batch_stats', 'var', jnp.ones, channels)
    if not train:
      mul = scale * jax.lax.rsqrt(running_var.value + self.epsilon)
      return _affine(x, mul, bias - running_mean.value * mul)

    # Parameters are initialised outside the map over devices, where the axis has no name.
    axis_name = None if self.is_initializing() else self.axis_name
    y, mean, var = _NORMALIZE[self.impl](x, scale, bias, self.epsilon, axis_name)
    if not self.is_initializing():
      count = x.size // x.shape[-1] * (1 if axis_name is None else jax.lax.axis_size(axis_name))
      unbiased = var * (count / max(count - 1, 1))
      running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
      running_var.value = self.momentum * running_var.value + (1 - self.momentum) * unbiased
    return y
