"""SimCLR (Chen et al. 2020) with any contrastive loss and any temperature."""

import dataclasses

import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.methods.protocol import Inputs, Method, Outputs, mean_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimCLR(Method):
  """The other views of an image are its positives, the views of all other images its negatives."""

  def loss(self, params, batch_stats, extra, inputs: Inputs):
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    pos, neg, where = pairs.in_batch(*views, axis_name=self.axis_name)
    tau = self.temperature.at(params['temperature'], inputs.step)
    loss = jnp.mean(self.contrast(pos, neg, where, tau, axis_name=self.axis_name))
    return loss, Outputs(batch_stats, extra, {'positive': jnp.mean(pos), **mean_temperature(tau, pos)})
