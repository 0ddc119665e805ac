"""SogCLR and iSogCLR: a global contrastive loss from small batches, with one learned temperature per image."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.methods.protocol import Inputs, Method, Outputs, write
from ssl_jax.registry import prefix, require, require_momentum


def robust_contrastive(
  differences: jax.Array,
  tau: jax.Array,
  average: jax.Array,
  *,
  where: jax.Array,
  momentum: float,
  rho: float = 0.3,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The robust global contrastive loss of each image, τ (log s + ρ) (Qiu et al. 2023, Eq. 6 and Alg. 1).

  g is the mean of exp(h / τ) over the negatives of an image in the batch. Its moving average s estimates the mean over
  all negatives. The gradient with respect to h is that of τ g / s with s fixed.

  Args:
    differences: h, the similarity of a negative minus that of the positive, `[B, M]`.
    tau: one temperature per image, `[B]`.
    average: the previous s, `[B]`; 0 for an image seen for the first time, whose s is its first g.
    where: False for entries of `differences` that are not negatives, `[B, M]`.
    momentum: the weight of the old average in the new one.
    rho: the largest KL divergence of the weights of an image's negatives from uniform weights; τ enforces this bound.

  Returns:
    The loss, s, and the derivative of the loss with respect to τ, each `[B]`; the last two have no gradient.
  """
  require('rho', rho, lambda rho: 0 <= rho < math.inf, 'at least 0 and finite')
  require_momentum(momentum=momentum)
  chex.assert_rank([differences, tau, average, where], [2, 1, 1, 2])
  mean = lambda x: jnp.mean(x, axis=1, where=where)
  exponentials = jnp.exp(jnp.where(where, differences, 0) / tau[:, None])
  g = mean(exponentials)
  fixed = jax.lax.stop_gradient
  s = fixed(jnp.where(average > 0, momentum * average + (1 - momentum) * g, g))
  slope = jnp.log(s) + rho - fixed(mean(differences * exponentials)) / (tau * s)
  loss, moved = tau * (jnp.log(s) + rho), tau * g / s
  return loss + moved - fixed(moved), s, slope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ISogCLR(Method):
  """SimCLR with one temperature per image, learned with the encoder (Qiu et al. 2023).

  τ <- clip(τ - tau_rate · u, tau_min, tau_max), where u is a moving average (with momentum `tau_momentum`) of the
  derivative of the image's loss with respect to τ. Images with many similar images get high temperatures, rare images
  low ones. All temperatures start at `tau_start`. With `tau_rate` 0 they stay there, which is SogCLR (Yuan et al. 2022)
  up to the factor τ of its loss. `momentum` is the weight of the old average in `robust_contrastive`. The defaults are
  those of the authors' library.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'robust_contrastive': robust_contrastive}

  tau_start: float = 0.1
  tau_min: float = 0.05
  tau_max: float = 0.7
  tau_rate: float = 0.01
  tau_momentum: float = 0.1
  momentum: float = 0.1

  def __post_init__(self):
    with prefix('loss'):  # `robust_contrastive` checks its arguments
      one, ones = jnp.zeros((1, 1)), jnp.ones(1)
      jax.eval_shape(lambda: self.contrast(one, ones, ones, where=one == 0, momentum=0.5))
    with prefix('method'):
      require_momentum(momentum=self.momentum, tau_momentum=self.tau_momentum)
      require('tau_rate', self.tau_rate, lambda rate: 0 <= rate < float('inf'), 'at least 0 and finite')
      require('tau_min', self.tau_min, lambda low: low >= 0.03, 'at least 0.03, so that e^(2/τ) is finite')
      require('tau_max', self.tau_max, lambda high: high >= self.tau_min, f'at least tau_min = {self.tau_min}')
      between = f'from tau_min = {self.tau_min} to tau_max = {self.tau_max}'
      require('tau_start', self.tau_start, lambda tau: self.tau_min <= tau <= self.tau_max, between)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    first = dict(average=0.0, tau=self.tau_start, slope=0.0)
    return params, batch_stats, {**extra, 'images': {key: jnp.full(self.plan.examples, x) for key, x in first.items()}}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    pos, neg, where = pairs.in_batch(*views, axis_name=self.axis_name)
    assert isinstance(neg, jax.Array)  # not in blocks
    # Queries are ordered view by view; move all pairs of an image into one row.
    rows = lambda x: jnp.moveaxis(x.reshape(len(views), len(inputs.index), -1), 0, 1).reshape(len(inputs.index), -1)
    h = neg - pos.mean(axis=1, keepdims=True)
    images = extra['images']
    old = {key: x[inputs.index] for key, x in images.items()}
    given = dict(where=rows(where), momentum=self.momentum)
    loss, average, slope = self.contrast(rows(h), old['tau'], old['average'], **given)
    slope = self.tau_momentum * old['slope'] + (1 - self.tau_momentum) * slope
    tau = jnp.clip(old['tau'] - self.tau_rate * slope, self.tau_min, self.tau_max)
    index = pairs.gather(inputs.index, self.axis_name)
    new = dict(average=average, tau=tau, slope=slope)
    images = {key: write(x, index, pairs.gather(new[key], self.axis_name)) for key, x in images.items()}
    metrics = {'positive_similarity': jnp.mean(pos), 'temperature': jnp.mean(old['tau'])}
    return jnp.mean(loss), Outputs(batch_stats, {**extra, 'images': images}, metrics)
