"""Losses between a prediction and a stop-gradient target: `loss(prediction, target, ...) -> [B]`.

There is one value per example. Functions of the whole batch (`sinkhorn`, `dino_centre`) take `axis_name`, to use the
global batch of all devices. Everything is computed in float32, or in float64 for float64 arguments.
"""

import chex
import jax
import jax.numpy as jnp

from ssl_jax.arrays import normalize, to_float32
from ssl_jax.registry import is_whole, require, require_momentum, require_positive
from ssl_jax.temperature import Temperature, scale


def byol(prediction: jax.Array, target: jax.Array) -> jax.Array:
  """‖p / ‖p‖ - z / ‖z‖‖² = 2 - 2 cos(p, z) (BYOL, Grill et al. 2020, Eq. 2).  [B, D] ×2 -> [B]

  >>> print(byol(jnp.array([[3.0, 0.0]]), jnp.array([[2.0, 2.0]])).round(3))
  [0.586]
  """
  return 2 + 2 * simsiam(prediction, target)


def simsiam(prediction: jax.Array, target: jax.Array) -> jax.Array:
  """-cos(p, z) (SimSiam, Chen & He 2021, Eq. 1).  [B, D] ×2 -> [B]

  >>> print(simsiam(jnp.array([[3.0, 0.0]]), jnp.array([[2.0, 2.0]])).round(3))
  [-0.707]
  """
  chex.assert_rank([prediction, target], 2)
  chex.assert_equal_shape([prediction, target])
  return -jnp.sum(normalize(prediction) * normalize(jax.lax.stop_gradient(target)), axis=1)


def dino(
  student: jax.Array,
  teacher: jax.Array,
  centre: jax.Array,
  temperature: Temperature,
  teacher_temperature: Temperature,
) -> jax.Array:
  """-sum_k softmax((teacher - centre) / tau_t)_k log softmax(student / tau_s)_k (DINO, Caron et al. 2021, Eq. 2).

  Shapes: [B, K], [B, K], [K] -> [B].

  >>> print(dino(jnp.zeros((1, 2)), jnp.array([[0.3, 0.1]]), jnp.zeros(2), 0.1, 0.04).round(3))
  [0.693]
  """
  chex.assert_rank(student, 2)
  chex.assert_equal_shape([student, teacher])
  chex.assert_shape(centre, student.shape[1:])
  teacher = jax.lax.stop_gradient(to_float32(teacher) - to_float32(centre)[None])
  return _cross_entropy(jax.nn.softmax(scale(teacher, teacher_temperature), axis=1), student, temperature)


def dino_centre(
  centre: jax.Array, teacher: jax.Array, *, momentum: float = 0.9, axis_name: str | None = None
) -> jax.Array:
  """momentum · centre + (1 - momentum) · the mean of the teacher's logits (DINO, Eq. 4).  [K], [B, K] -> [K]

  >>> print(dino_centre(jnp.zeros(2), jnp.array([[1.0, 0.0], [1.0, 2.0]])).round(3))
  [0.1 0.1]
  """
  require_momentum(momentum=momentum)
  chex.assert_rank(teacher, 2)
  chex.assert_shape(centre, teacher.shape[1:])
  mean = jnp.mean(jax.lax.stop_gradient(to_float32(teacher)), axis=0)
  mean = mean if axis_name is None else jax.lax.pmean(mean, axis_name)
  return momentum * centre + (1 - momentum) * mean


def sinkhorn(
  scores: jax.Array,
  *,
  epsilon: float = 0.05,
  iterations: int = 3,
  others: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """Soft assignments that use all prototypes equally (SwAV, Caron et al. 2020, Eq. 3-5).  [B, K] -> [B, K]

  The columns (prototypes, over the examples of all devices) and then the rows (examples) of e^(scores / epsilon) are
  scaled to equal sums, `iterations` times; each row then sums to 1. `others` [M, K] are the scores of additional
  examples, the same on every device, which are included in the sums but not returned. The gradient is stopped.

  >>> print(sinkhorn(jnp.array([[1.0, 0.9], [1.0, 0.0]])).round(2))
  [[0.14 0.86]
   [1.   0.  ]]
  """
  require_positive(epsilon=epsilon)
  require('iterations', iterations, lambda n: is_whole(n) and n >= 1, 'a whole number of at least 1')
  parts = [jax.lax.stop_gradient(to_float32(x)) / epsilon for x in (scores, others) if x is not None]
  chex.assert_rank(parts, 2)
  for _ in range(iterations):
    totals = [jax.nn.logsumexp(part, axis=0, keepdims=True) for part in parts]
    if axis_name is not None:
      totals[0] = jax.nn.logsumexp(jax.lax.all_gather(totals[0], axis_name), axis=0)
    total = jax.nn.logsumexp(jnp.concatenate(totals), axis=0, keepdims=True)
    parts = [jax.nn.log_softmax(part - total, axis=1) for part in parts]
  return jnp.exp(parts[0])


def swav(scores: jax.Array, codes: jax.Array, temperature: Temperature) -> jax.Array:
  """-sum_k code_k log softmax(scores / tau)_k, with the code of another view (SwAV, Eq. 2).  [B, K] ×2 -> [B]

  >>> print(swav(jnp.array([[1.0, 0.9]]), jnp.array([[1.0, 0.0]]), 0.1).round(3))
  [0.313]
  """
  chex.assert_rank([scores, codes], 2)
  chex.assert_equal_shape([scores, codes])
  return _cross_entropy(jax.lax.stop_gradient(to_float32(codes)), scores, temperature)


def _cross_entropy(target: jax.Array, logits: jax.Array, temperature: Temperature) -> jax.Array:
  return -jnp.sum(target * jax.nn.log_softmax(scale(to_float32(logits), temperature), axis=1), axis=1)
