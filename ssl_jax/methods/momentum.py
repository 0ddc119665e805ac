"""The momentum encoder that several methods share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ssl_jax.methods.protocol import Inputs, Method
from ssl_jax.registry import prefix, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(Method):
  """A second encoder and projector, extra['momentum'], whose weights follow the trained ones (He et al. 2020).

  slow <- m slow + (1 - m) fast at the start of each step, i.e. right after the previous optimizer step. m is `momentum`
  or, with `final_momentum`, m_end - (m_end - m)(1 + cos(pi step / steps)) / 2 (Grill et al. 2020). Like the trained
  encoder, the second encoder normalizes with batch statistics; it keeps no running statistics.
  """

  momentum: float = 0.999
  final_momentum: float | None = None

  def __post_init__(self):
    with prefix('method'):
      require('momentum', self.momentum, lambda m: 0 <= m <= 1, 'in [0, 1]')
      require('final_momentum', self.final_momentum, lambda m: m is None or 0 <= m <= 1, 'in [0, 1], or None')

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    return params, batch_stats, {**extra, 'momentum': _followed(params)}

  def start_from(self, encoder: Mapping, params: Any, batch_stats: Any, extra: Any) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().start_from(encoder, params, batch_stats, extra)
    return params, batch_stats, {**extra, 'momentum': _followed(params)}

  def follow(self, params: Any, extra: Any, inputs: Inputs) -> Any:
    """The weights of the momentum encoder at this step."""
    rate = 1 - self.momentum
    if self.final_momentum is not None:
      part = inputs.step.astype(jnp.float32) / self.plan.total_steps
      rate = 1 - self.final_momentum + (self.final_momentum - self.momentum) * (1 + jnp.cos(jnp.pi * part)) / 2
    fast = jax.lax.stop_gradient(_followed(params))
    return jax.tree.map(lambda slow, fast: slow + rate * (fast - slow), extra['momentum'], fast)

  def targets(self, slow: Any, batch_stats: Any, views: Sequence[jax.Array]) -> list[jax.Array]:
    """The projections of the momentum encoder, with their gradient stopped."""
    outputs, _ = self.encode(slow, batch_stats, views, predict=False)
    return [jax.lax.stop_gradient(output['projector']) for output in outputs]


def _followed(params):
  return {name: params['network'][name] for name in ('encoder', 'projector') if name in params['network']}
