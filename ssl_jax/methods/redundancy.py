"""Methods whose loss compares statistics of views: Barlow Twins, VICReg, W-MSE, Zero-CL, ARB, EMP-SSL."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import losses
from ssl_jax.methods.protocol import Inputs, Method, Outputs, mean
from ssl_jax.registry import prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redundancy(Method):
  """Any loss of `ssl_jax.losses.redundancy`; for more than two views, its mean over the pairs of views."""

  accepts: ClassVar[Mapping[str, Callable]] = {
    f.__name__: f for f in (losses.barlow_twins, losses.vicreg, losses.w_mse, losses.zero_cl, losses.arb)
  }

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    z = jax.ShapeDtypeStruct((self.plan.batch_size, self.width(params, batch_stats, images)), jnp.float32)
    with prefix('loss'):  # the loss checks its own arguments when traced
      jax.eval_shape(self.contrast, z, z)
    return params, batch_stats, extra

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    values = [self.contrast(*pair, axis_name=self.axis_name) for pair in itertools.combinations(views, 2)]
    return mean(values), Outputs(batch_stats, extra, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMPSSL(Redundancy):
  """EMP-SSL (Tong et al. 2023): one loss over all views, which are many small crops."""

  accepts: ClassVar[Mapping[str, Callable]] = {'emp_ssl': losses.emp_ssl}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    return self.contrast(*views, axis_name=self.axis_name), Outputs(batch_stats, extra, {})
