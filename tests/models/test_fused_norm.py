"""The fused batch norm equals the plain one, values and gradients, on one device and several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax.models import fused_norm, norm

EPSILON = 1e-5


def arrays(rows=8, channels=128, dtype=jnp.float32):
  """x, scale, bias, add, and a random direction; the mean of x matters, and shards of x differ."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  x = draw(rows, 8, 8, channels) + jnp.arange(float(rows)).reshape(-1, 1, 1, 1)
  return x.astype(dtype), draw(channels), draw(channels), draw(*x.shape).astype(dtype), draw(*x.shape).astype(dtype)


def gradients(function, x, scale, bias, add, direction, axis_name=None):
  """(y, mean, var) and the gradients of the local mean of y · direction, in x, scale, bias and add."""

  def loss(x, scale, bias, add):
    y, *statistics = function(x, scale, bias, add, axis_name=axis_name)
    return (y * direction).astype(jnp.float32).mean(), (y, *statistics)

  return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(x, scale, bias, add)


def fused(relu):
  return lambda *args, axis_name: fused_norm.normalize(*args, relu, EPSILON, axis_name, True)


def plain(relu):
  return lambda *args, axis_name: norm._normalize(*args, relu, EPSILON, axis_name)


def assert_close(actual, expected, tolerance):
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize('with_add', [False, True])
@pytest.mark.parametrize('relu', [False, True])
def test_equals_plain(relu, with_add):
  x, scale, bias, add, direction = arrays()
  add = add if with_add else None
  actual, expected = (
    jax.jit(functools.partial(gradients, f(relu)))(x, scale, bias, add, direction) for f in (fused, plain)
  )
  assert_close(actual, expected, 2e-6)


def test_bfloat16_keeps_float32_statistics():
  x, scale, bias, add, direction = arrays(dtype=jnp.bfloat16)
  found, (y, mean, var) = jax.jit(functools.partial(gradients, fused(True)))(x, scale, bias, add, direction)
  assert y.dtype == found[0].dtype == found[3].dtype == jnp.bfloat16
  wide = [v.astype(jnp.float32) for v in (x, add, direction)]
  expected, (_, *statistics) = gradients(plain(True), wide[0], scale, bias, wide[1], wide[2])
  assert_close((mean, var), statistics, 1e-6)
  assert_close(found[0], expected[0], 2e-2)


def in_float64(x, scale, bias, add, direction):
  """y and the gradients of the mean of y · direction, from the formulas, for an addition and ReLU."""
  x, scale, bias, add, direction = (np.asarray(v, np.float64) for v in (x, scale, bias, add, direction))
  axes = tuple(range(x.ndim - 1))
  rstd = 1 / np.sqrt(x.var(axes) + EPSILON)
  x_hat = (x - x.mean(axes)) * rstd
  before = x_hat * scale + bias + add
  d = np.where(before > 0, direction, 0) / x.size
  dx = scale * rstd * (d - d.mean(axes) - x_hat * (d * x_hat).mean(axes))
  return np.maximum(before, 0), (dx, (d * x_hat).sum(axes), d.sum(axes), d)


def test_bfloat16_is_at_least_as_precise_as_plain():
  """Against float64, relative to the norm: the fused form rounds once, after the addition."""
  inputs = arrays(dtype=jnp.bfloat16)
  y, expected = in_float64(*inputs)

  def errors(function):
    found, (value, *_) = jax.jit(functools.partial(gradients, function(True)))(*inputs)
    pairs = zip((value, *found), (y, *expected), strict=True)
    return np.array([np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs])

  ours, plains = errors(fused), errors(plain)
  assert (ours <= 1.01 * plains).all(), (ours, plains)
  assert ours.max() < 3e-3, ours


@pytest.mark.parametrize('devices', [2, 4])
def test_sharded_equals_single(devices):
  x, scale, bias, add, direction = arrays()
  expected, values = jax.jit(functools.partial(gradients, plain(True)))(x, scale, bias, add, direction)
  split = lambda v: v.reshape(devices, -1, *v.shape[1:])
  mapped = jax.pmap(functools.partial(gradients, fused(True), axis_name='i'), 'i', in_axes=(0, None, None, 0, 0))
  (dx, d_scale, d_bias, d_add), (y, mean, var) = mapped(split(x), scale, bias, split(add), split(direction))
  assert_close((y.reshape(x.shape), mean[0], var[-1]), values, 2e-6)
  # The gradient of the mean over devices is that of the local mean divided by their number.
  joined = [v.reshape(x.shape) / devices for v in (dx, d_add)]
  assert_close((joined[0], d_scale.mean(0), d_bias.mean(0), joined[1]), expected, 2e-6)


def test_arrays_that_do_not_divide_into_tiles_stay_plain(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  takes = lambda *shape: fused_norm.fits(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
  assert takes(8, 8, 8, 64) and takes(256, 128)
  assert not takes(8, 8, 8, 96) and not takes(144, 64) and not takes(512, 32, 32, 64)
