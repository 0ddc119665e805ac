"""SimCLR (Chen et al. 2020) with any contrastive loss and any temperature; with more views CMC and CACR."""

import dataclasses

import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.methods.protocol import Inputs, Method, Outputs, mean_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimCLR(Method):
  """The other views of an image are its positives, the views of all other images its negatives.

  `by_view_pair` takes the negatives of a query from one other view at a time, as the CACR authors' code does.
  """

  by_view_pair: bool = False

  def loss(self, params, batch_stats, extra, inputs: Inputs):
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    make = pairs.by_view_pair if self.by_view_pair else pairs.in_batch
    pos, neg, where = make(*views, axis_name=self.axis_name)
    tau = self.tau(params, inputs)
    loss = jnp.mean(self.contrast(pos, neg, where, tau, axis_name=self.axis_name))
    return loss, Outputs(batch_stats, extra, {'positive': jnp.mean(pos), **mean_temperature(tau, pos)})
