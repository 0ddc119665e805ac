"""Contrast with all images from small batches, with a temperature of each image's own: SogCLR and iSogCLR."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.methods.protocol import Inputs, Method, Outputs, require_momentum, write
from ssl_jax.registry import prefix, require


def robust_contrastive(differences, tau, average, *, where, momentum, rho=0.3):
  """The robust global contrastive loss of each image, τ (log s + ρ) (Qiu et al. 2023, Eq. 6 and Alg. 1).

  g = mean of exp(h / τ) over an image's negatives, of which the batch has a few; s, its moving average, stands for the
  mean over all of them. The gradient with respect to h is that of τ g / s, in which s is fixed.

  Args:
    differences: h, similarity of a negative less that of the positive, `[B, M]`.
    tau: of each image, `[B]`.
    average: s of the step before, `[B]`; 0 for an image that was not met yet, whose s is its first g.
    where: False where `differences` is no negative, `[B, M]`.
    momentum: the share of the old average in the new one.
    rho: the largest KL divergence of the weights of an image's negatives from equal weights: what τ is learned for.

  Returns:
    The loss, s, and the derivative of the loss by τ, each `[B]`; no gradient flows through the last two.
  """
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
  """SimCLR whose every image has a temperature, learned with the encoder (Qiu et al. 2023).

  τ <- clip(τ - tau_rate · u, tau_min, tau_max), u the moving average (of which `tau_momentum` is kept) of the
  derivative of the image's loss by τ. Images with many like them come to high temperatures, rare ones to low ones.
  All start at `tau_start`; with `tau_rate` 0 they stay there, which is SogCLR (Yuan et al. 2022) but for the factor τ
  of its loss. The values are those of the authors' library.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'robust_contrastive': robust_contrastive}

  tau_start: float = 0.1
  tau_min: float = 0.05
  tau_max: float = 0.7
  tau_rate: float = 0.01
  tau_momentum: float = 0.1
  momentum: float = 0.1

  def __post_init__(self):
    with prefix('loss'):
      rho = getattr(self.contrast, 'keywords', {}).get('rho', 0.0)
      require('rho', rho, lambda rho: 0 <= rho < math.inf, 'at least 0 and finite')
    with prefix('method'):
      require_momentum(momentum=self.momentum, tau_momentum=self.tau_momentum)
      require('tau_rate', self.tau_rate, lambda rate: 0 <= rate < float('inf'), 'at least 0 and finite')
      require('tau_min', self.tau_min, lambda low: low >= 0.03, 'at least 0.03, so that e^(2/τ) is finite')
      require('tau_max', self.tau_max, lambda high: high >= self.tau_min, f'at least tau_min = {self.tau_min}')
      between = f'from tau_min = {self.tau_min} to tau_max = {self.tau_max}'
      require('tau_start', self.tau_start, lambda tau: self.tau_min <= tau <= self.tau_max, between)

  def init(self, key, images):
    params, batch_stats, extra = super().init(key, images)
    first = dict(average=0.0, tau=self.tau_start, slope=0.0)
    return params, batch_stats, {**extra, 'images': {key: jnp.full(self.plan.examples, x) for key, x in first.items()}}

  def loss(self, params, batch_stats, extra, inputs: Inputs):
    views, batch_stats = self.embed(params, batch_stats, inputs.views)
    pos, neg, where = pairs.in_batch(*views, axis_name=self.axis_name)
    # The queries come view by view: all of an image's pairs in one row.
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
