"""The memory bank (Wu et al. 2018), as used by Wang & Liu 2021."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.arrays import normalize
from ssl_jax.losses import Loss
from ssl_jax.methods.protocol import Inputs, Method, Outputs, mean, of_positives, write
from ssl_jax.registry import is_whole, prefix, require, require_momentum


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBank(Method):
  """Each training image has an entry in the bank: its own entry is the positive, all other entries are negatives.

  bank[i] <- normalize(momentum · bank[i] + (1 - momentum) · z_i) after each step, where z_i is the mean over the views
  of the unit embeddings of image i.

  Attributes:
    momentum: the weight of the old entry.
    negatives: the number of entries drawn at each step, with replacement, as the negatives of the whole batch; 0 for
      all entries. A `hard` loss selects its fraction from these.
    block: as in SimCLR.
  """

  least_views: ClassVar[int] = 1

  contrast: Loss
  momentum: float = 0.5
  negatives: int = 0
  block: int = 0

  def __post_init__(self):
    with prefix('method'):
      require_momentum(momentum=self.momentum)
      require('negatives', self.negatives, lambda n: is_whole(n) and n >= 0, 'at least 1, or 0 for the whole bank')
      pairs.check_block(self.block)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    shape = (self.plan.examples, self.width(params, batch_stats, images))
    bank = normalize(jax.random.normal(jax.random.fold_in(key, 1), shape))
    return params, batch_stats, {**extra, 'bank': bank}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    bank, tau = extra['bank'], self.tau(params, inputs)
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    views = [normalize(view) for view in views]
    drawn = jax.random.randint(inputs.key, (self.negatives,), 0, len(bank)) if self.negatives else None
    index = jnp.tile(inputs.index, len(views))
    # Entries are already unit vectors; normalizing them again would copy the bank.
    queries = jnp.concatenate(views)
    pos, neg, where = pairs.with_bank(queries, bank, index, drawn, similarity='dot', block=self.block)
    loss = jnp.mean(self.contrast.at(params)(pos, neg, tau, where=where, axis_name=self.axis_name))
    extra = {**extra, 'bank': self._updated(bank, inputs.index, jax.lax.stop_gradient(mean(views)))}
    return loss, Outputs(batch_stats, extra, of_positives(pos, self.contrast.temperature(tau, pos)))

  def _updated(self, bank, index, z):
    index, z = pairs.gather(index, self.axis_name), pairs.gather(z, self.axis_name)
    return write(bank, index, normalize(self.momentum * bank[index] + (1 - self.momentum) * z))
