"""Array conversions, cross-entropy, and a check of `jax.shard_map`, shared by all higher layers."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp


def to_float32(x: jax.typing.ArrayLike) -> jax.Array:
  """Converts x to float32. A float64 x stays float64, because tests check gradients in float64.

  >>> to_float32(jnp.ones(2, jnp.bfloat16)).dtype
  dtype('float32')
  """
  x = jnp.asarray(x)
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def normalize(x: jax.typing.ArrayLike, axis: int = -1) -> jax.Array:
  """x / ‖x‖ in float32.  [..., D] -> [..., D]

  A vector shorter than 1e-12 becomes 0, with gradient 0. One longer than 1e19, whose square overflows, becomes NaN.

  >>> print(normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
  [[0.6 0.8]
   [0.  0. ]]
  """
  x = to_float32(x)
  square = jnp.sum(x * x, axis=axis, keepdims=True)
  short = square < 1e-24
  inverse = jnp.where(short, 0, jax.lax.rsqrt(jnp.where(short, 1, square)))
  return x * jnp.where(square < jnp.inf, inverse, jnp.nan)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits) of each label.  [..., C], int [...] -> [...]

  Unlike with `optax.softmax_cross_entropy_with_integer_labels`, the gradient is not a scatter, which would be slow with
  deterministic operations on a GPU.

  >>> print(cross_entropy(jnp.array([[0.0, 0.0], [2.0, 0.0]]), jnp.array([0, 0])).round(3))
  [0.693 0.127]
  """
  own = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  return -jnp.sum(jnp.where(own, jax.nn.log_softmax(logits), 0), axis=-1)


def varying_axes(x: jax.Array) -> Collection[str]:
  """The mapped axes along which x varies under `jax.shard_map(..., check_vma=True)`, its default; otherwise none.

  >>> len(varying_axes(jnp.ones(2)))
  0
  """
  kind = jax.typeof(x)
  varying: Any = getattr(getattr(kind, 'manual_axis_type', None), 'varying', None) or getattr(kind, 'vma', ())
  return varying


def check_sharding(x: jax.Array, axis_name: str | tuple[str, ...] | None) -> None:
  """Raises a ValueError on a mesh with explicit axes, and under `jax.shard_map(..., check_vma=True)`, its default.

  With explicit axes, jax leaves it to the caller to shard the result of each reshape. With `check_vma=True`, it already
  sums the gradients of replicated parameters over the devices: the `lax.pmean` that losses here require would then give
  gradients that are too large by a factor of the number of devices.

  >>> check_sharding(jnp.ones(2), None)
  """
  spec = jax.typeof(x).sharding.spec
  if any(axis is not None for axis in spec):
    raise ValueError(
      f'embeddings are sharded as {spec} on a mesh with explicit axes, the default of '
      'jax.make_mesh: make it with axis_types=(jax.sharding.AxisType.Auto,) for each axis, or use jax.shard_map'
    )
  names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
  if any(name in varying_axes(x) for name in names):
    raise ValueError(
      f'axis_name = {axis_name!r} belongs to jax.shard_map(..., check_vma=True), where gradients would be too large by '
      'the number of devices: give check_vma=False, and average the gradients with lax.pmean'
    )
