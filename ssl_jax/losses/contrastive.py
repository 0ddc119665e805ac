"""Contrastive losses as functions of similarities.

Each loss has the form `loss(pos, neg, ..., *, where=None) -> [Q]`, with one value per query:

- `pos` `[Q, K]` or `[Q]`: similarities of each query with its K positives;
- `neg` `[Q, M]`: similarities with its negatives;
- `where` `[Q, M]`: False where `neg` is not a negative;
- `temperature`, if the loss takes one: any `ssl_jax.temperature.Temperature`.

`ssl_jax.pairs` computes the first three from embeddings. `neg` can also be a `pairs.NegativeBlocks`, which gives the
same values and gradients without storing `[Q, M]`. The mean over the queries is the loss of the paper. If the paper
defines a loss for one positive per query, the loss for K > 1 is the mean over the K positives.

Values are float32 (float64 for float64 similarities). Values and gradients are finite down to temperatures of 0.01. A
query without negatives raises an error; inside jit and in blocks of negatives, its value and gradient are 0 instead.

A few losses contain a mean over all queries and take `axis_name`, so that the mean is over all devices. As described in
`ssl_jax.pairs`, differentiate the mean over this device's queries, and average the gradients with `lax.pmean`.

Papers: DySTreSS (Manna et al. 2024), Wang & Liu 2021 (Understanding the Behaviour of Contrastive Loss), CACR (Zheng et
al. 2023) and Lee 2025 (Understanding Self-Supervised Contrastive Learning through Supervised Objectives). Others are
named in each function.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax import pairs
from ssl_jax import temperature as temperatures
from ssl_jax.arrays import to_float32
from ssl_jax.losses.base import contrastive_loss, negatives, over_negatives
from ssl_jax.losses.reductions import count, log_mean_exp, log_mean_exp_by_pair, logsumexp, masked, total
from ssl_jax.registry import require, require_positive
from ssl_jax.temperature import Temperature, scale


@contrastive_loss(streamed=True)
def info_nce(pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None) -> jax.Array:
  """-log(e^(pos/tau) / (e^(pos/tau) + sum e^(neg/tau))) (Wang & Liu 2021, Eq. 1; DySTreSS, Eq. 1; InfoNCE, NT-Xent).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(info_nce(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5))
  [0.2721]
  """
  # -log(p / (p + n)) = softplus(log n - log p), which is accurate even if the loss is small.
  log_negatives = logsumexp(scale(neg, temperature), where)
  return jnp.mean(jax.nn.softplus(log_negatives[:, None] - scale(pos, temperature)), axis=1)


@contrastive_loss(streamed=True)
def multi_positive(
  pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None
) -> jax.Array:
  """The mean over the K positives of `info_nce` with the same negatives (the CMC rows of CACR, App. C).

  This is another name for `info_nce` with `pos` [Q, K]. Shapes: [Q, K], [Q, M] -> [Q].

  >>> print(multi_positive(jnp.array([[0.9, 0.5]]), jnp.array([[0.1, -0.2]]), 0.5))
  [0.4002]
  """
  return info_nce(pos, neg, temperature, where=where)


@contrastive_loss(separable=True, streamed=True)
def decoupled(pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None) -> jax.Array:
  """-pos/tau + log sum e^(neg/tau) (DCL, Yeh et al. 2022; Lee 2025, Eq. 14).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(decoupled(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5))
  [-1.1625]
  """
  return logsumexp(scale(neg, temperature), where) - jnp.mean(scale(pos, temperature), axis=1)


@contrastive_loss(separable=True, learned=('bias',))
def sigmoid(
  pos: jax.Array, neg: jax.Array, temperature: Temperature, *, bias: float = -10.0, where: jax.Array | None = None
) -> jax.Array:
  """-log sigmoid(pos/tau + bias) - sum log sigmoid(-(neg/tau + bias)) (SigLIP, Zhai et al. 2023, Eq. 1).

  Each pair is classified independently. Training learns the bias; `bias` is its initial value.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(sigmoid(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.1, bias=-10.0))
  [1.3134]
  """
  require('bias', bias, math.isfinite, 'a finite number')
  assert where is not None  # set by `contrastive_loss`
  repelled = jnp.sum(jnp.where(where, jax.nn.softplus(scale(neg, temperature) + bias), 0), axis=1)
  return jnp.mean(jax.nn.softplus(-scale(pos, temperature) - bias), axis=1) + repelled


@contrastive_loss(separable=True, streamed=True)
def decoupled_weighted(
  pos: jax.Array,
  neg: jax.Array,
  temperature: Temperature,
  *,
  sigma: float = 0.5,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """-w pos/tau + log sum e^(neg/tau), w = 2 - e^(pos/sigma) / E[e^(pos/sigma)] (DCLW, Yeh et al. 2022).

  The expectation is over all positive pairs of the batch; the gradient through w is stopped.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(decoupled_weighted(jnp.array([0.9, 0.1]), jnp.zeros((2, 3)), 0.5))
  [0.4939 0.7658]
  """
  require_positive(sigma=sigma)
  logits = jax.lax.stop_gradient(pos) / sigma
  more = 1 - jnp.exp(logits - log_mean_exp(logits, jnp.ones(pos.shape, bool), axis_name=axis_name))  # w - 1
  return decoupled(pos, neg, temperature, where=where) - jnp.mean(more * scale(pos, temperature), axis=1)


@contrastive_loss(
  no_temperature='it is linear in the similarities (Wang & Liu 2021, Eq. 3)', separable=True, streamed=True
)
def simple(pos: jax.Array, neg: jax.Array, *, weight: float = 1.0, where: jax.Array | None = None) -> jax.Array:
  """-pos + weight · sum neg (Wang & Liu 2021, Eq. 3).  [Q] or [Q, K], [Q, M] -> [Q]

  >>> print(simple(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-1.]
  """
  require_positive(weight=weight)
  return weight * total(neg, where) - jnp.mean(pos, axis=1)


@contrastive_loss()
def hard(
  pos: jax.Array, neg: jax.Array, temperature: Temperature, *, fraction: float, where: jax.Array | None = None
) -> jax.Array:
  """`info_nce` over the hardest negatives of each query (Wang & Liu 2021, Eq. 8-9).

  These are the ceil(fraction · M) most similar negatives, where M is the number of negatives that `where` keeps.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5, fraction=0.5))
  [0.1839]
  """
  hardest, where = _hardest(neg, where, fraction)
  return info_nce(pos, hardest, temperature, where=where)


@contrastive_loss(no_temperature='it is linear in the similarities (Wang & Liu 2021, Eq. 3)', separable=True)
def hard_simple(
  pos: jax.Array, neg: jax.Array, *, fraction: float, weight: float = 1.0, where: jax.Array | None = None
) -> jax.Array:
  """`simple` over the hardest negatives of each query, as in `hard` (Wang & Liu 2021, sec. 5.5).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard_simple(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), fraction=0.5))
  [-0.8]
  """
  hardest, where = _hardest(neg, where, fraction)
  return simple(pos, hardest, weight=weight, where=where)


@contrastive_loss(no_temperature='its alpha is 1 / tau', separable=True, inverse_temperature='alpha', streamed=True)
def balanced(pos: jax.Array, neg: jax.Array, *, alpha: float, lam: float, where: jax.Array | None = None) -> jax.Array:
  """-pos + lam · log(sum e^(alpha neg)) / alpha (balanced contrastive loss, Lee 2025, Eq. 17).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(balanced(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), alpha=2.0, lam=4.0))
  [0.375]
  """
  require_positive(alpha=alpha, lam=lam)
  return lam * logsumexp(alpha * neg, where) / alpha - jnp.mean(pos, axis=1)


@contrastive_loss(no_temperature='its alpha is 1 / tau', inverse_temperature='alpha', streamed=True)
def generalized_nt_xent(
  pos: jax.Array, neg: jax.Array, *, alpha: float, lam: float, where: jax.Array | None = None
) -> jax.Array:
  """-pos + lam · log(e^(alpha pos) + sum e^(alpha neg)) / alpha (Lee 2025, sec. 6).

  With lam = 1 it is tau · `info_nce` at tau = 1 / alpha. Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(generalized_nt_xent(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), alpha=2.0, lam=1.0))
  [0.136]
  """
  require_positive(alpha=alpha, lam=lam)
  return jnp.mean(lam * jnp.logaddexp(alpha * pos, logsumexp(alpha * neg, where)[:, None]) / alpha - pos, axis=1)


@contrastive_loss(
  no_temperature='it sets its own from tau0, alpha and threshold',
  own_temperature=temperatures.macl,
  cosine_only='it scales tau by the similarity',
  streamed=True,
)
def macl(
  pos: jax.Array,
  neg: jax.Array,
  *,
  tau0: float = 0.1,
  alpha: float = 0.5,
  threshold: float = 0.0,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """-log(P) / (1 - P), P = e^(pos/tau) / (e^(pos/tau) + sum e^(neg/tau)) (MACL, Huang et al. 2023).

  tau = tau0 (1 + alpha (mean of pos - threshold)) is `ssl_jax.temperature.macl`, with the mean over all positive pairs
  of the batch. Gradients through tau and through 1 / (1 - P) are stopped. Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(macl(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), tau0=0.5))
  [1.2355]
  """
  tau = temperatures.macl(pos, tau0=tau0, alpha=alpha, threshold=threshold, axis_name=axis_name)
  x = over_negatives(lambda neg, where: logsumexp(neg / tau, where), neg, where)[:, None] - pos / tau
  # -log P = softplus(x) and 1 - P = sigmoid(x); their quotient tends to 1 as both vanish. As softplus' = sigmoid, the
  # gradient of the weighted loss with respect to x is exactly 1.
  value = jax.nn.softplus(y := jnp.maximum(x, -50)) / jax.nn.sigmoid(y)
  return jnp.mean(jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x)), axis=1)


@contrastive_loss(cosine_only='it bounds its negatives by e^(-1/tau)', streamed=True)
def hard_negative(
  pos: jax.Array,
  neg: jax.Array,
  temperature: Temperature,
  *,
  beta: float,
  tau_plus: float = 0.0,
  where: jax.Array | None = None,
) -> jax.Array:
  """-log(e^(pos/tau) / (e^(pos/tau) + G)) (HCL, Robinson et al. 2021; the HN-CL rows of CACR).

  G = max(M · (E_w[e^(neg/tau)] - tau_plus · e^(pos/tau)) / (1 - tau_plus), M · e^(-1/tau)), with weights
  w ∝ e^(beta · neg/tau) over the M negatives. beta emphasizes hard negatives; tau_plus is the assumed fraction of
  false negatives. At tau_plus = 0, the derivative with respect to tau_plus is not finite.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard_negative(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5, beta=1.0))
  [0.2921]
  """
  require('beta', beta, lambda x: 0 <= x < math.inf, 'at least 0 and finite')
  require('tau_plus', tau_plus, lambda x: 0 <= x < 1, 'in [0, 1)')
  p, n = scale(pos, temperature), scale(neg, temperature)
  log_expected = (logsumexp((1 + beta) * n, where) - logsumexp(beta * n, where))[:, None]
  # log(E - tau_plus e^p) if that is positive; otherwise the floor applies.
  difference = jnp.log(jnp.asarray(tau_plus, p.dtype)) + p - log_expected
  less = ~(difference >= -1e-30)  # closer to 0, the derivative is not finite; NaN is kept
  debiased = log_expected + jnp.log(-jnp.expm1(jnp.where(less, difference, -1))) - jnp.log1p(-tau_plus)
  floor = scale(jnp.full_like(p, -1), temperature)
  log_count = jnp.log(jnp.maximum(count(neg, where), 1).astype(p.dtype))[:, None]
  return jnp.mean(jax.nn.softplus(log_count + jnp.where(less, jnp.maximum(debiased, floor), floor) - p), axis=1)


@contrastive_loss(
  no_temperature='t takes its place',
  cosine_only='it takes 2 - 2s for the squared distance',
  separable=True,
  streamed=True,
)
def align_uniform(
  pos: jax.Array,
  neg: jax.Array,
  *,
  t: float = 2.0,
  weight: float = 1.0,
  where: jax.Array | None = None,
  view_pairs: int = 1,
  axis_name: str | None = None,
) -> jax.Array:
  """E‖x - x⁺‖² + weight · log E[e^(-t ‖x - x⁻‖²)], ‖x - y‖² = 2 - 2 s (Wang & Isola 2020; the AU-CL rows of CACR).

  The second expectation is over the negatives of all queries, so every query has the same second term. With
  `view_pairs` above 1, the queries are those of that many pairs of views, one pair after the other. The expectation is
  then over the queries of one pair, and the logarithm is averaged over the pairs, as in the CACR authors' code for the
  RBF cost. In Wang & Isola's code, the negatives are those of the query's own view, with a logarithm per view.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(align_uniform(jnp.array([0.9, 0.5]), jnp.zeros((2, 3))))
  [-3.8 -3. ]
  """
  require_positive(t=t, weight=weight)
  sums = lambda neg, where: (logsumexp(t * (2 * neg - 2), where), count(neg, where))
  apart = log_mean_exp_by_pair(*over_negatives(sums, neg, where), view_pairs=view_pairs, axis_name=axis_name)
  return jnp.mean(2 - 2 * pos, axis=1) + weight * apart


def nt_xent(
  z1: jax.Array, z2: jax.Array, temperature: Temperature = 0.5, axis_name: str | None = None, block: int = 0
) -> jax.Array:
  """NT-Xent of SimCLR: `info_nce` of two views, with all other views of the batch as negatives.  [B, D] ×2 -> [2B]

  The views are normalized here. With `block` above 0, that many queries are computed at a time, which needs memory for
  block · 2B similarities instead of (2B)². `axis_name` is the name of a mapped axis; for its gradient, see
  `ssl_jax.pairs`.

  >>> print(nt_xent(jnp.eye(2), jnp.eye(2), block=3))
  [0.2395 0.2395 0.2395 0.2395]
  """
  pos, neg, where = pairs.in_batch(z1, z2, axis_name=axis_name, block=block)
  return info_nce(pos, neg, temperature, where=where)


def penalties(neg: jax.Array, temperature: Temperature, where: jax.Array | None = None) -> jax.Array:
  """r = e^(neg/tau) / sum e^(neg/tau), the relative penalty on each negative (Wang & Liu 2021, Eq. 5).

  Shapes: [Q, M] -> [Q, M].

  At a constant temperature, r is the gradient of `info_nce` with respect to each negative, divided by the gradient with
  respect to the positive, up to the sign. It is 0 where `where` is False.

  >>> print(penalties(jnp.array([[0.5, 0.0]]), 0.5))
  [[0.7311 0.2689]]
  """
  log_r, where = _log_penalties(neg, temperature, where)
  return jnp.where(where, jnp.exp(log_r), 0)


def penalty_entropy(neg: jax.Array, temperature: Temperature, where: jax.Array | None = None) -> jax.Array:
  """H(r) = -sum r log r of `penalties`, which grows with the temperature (Wang & Liu 2021, supplement, sec. 2).

  Shapes: [Q, M] -> [Q].

  >>> print(penalty_entropy(jnp.array([[0.5, 0.0]]), 0.5))
  [0.5822]
  """
  log_r, where = _log_penalties(neg, temperature, where)
  log_r = jnp.where(where, log_r, 0)
  return -jnp.sum(jnp.where(where, jnp.exp(log_r) * log_r, 0), axis=1)


def _log_penalties(neg, temperature, where):
  if isinstance(neg, pairs.NegativeBlocks):
    raise ValueError('neg comes in blocks, but penalties are a whole matrix: make pairs with block=0')
  chex.assert_rank(neg, 2)
  neg = to_float32(neg)
  where = negatives(neg, where)
  chex.assert_equal_shape([neg, where])
  return jax.nn.log_softmax(masked(scale(jnp.where(where, neg, 0), temperature), where), axis=1), where


def _hardest(neg: jax.Array, where: jax.Array | None, fraction: float) -> tuple[jax.Array, jax.Array]:
  """The ceil(fraction · M) largest of the M negatives that `where` keeps for each query, and their mask."""
  if isinstance(fraction, jax.core.Tracer):
    raise ValueError('fraction is traced, but it sets the shape of an array: give a number, or make it static in jit')
  require('fraction', fraction, lambda x: 0 < x <= 1, 'in (0, 1]')
  assert where is not None  # set by `contrastive_loss`
  # How many of 0, 1, ..., M negatives to keep. With rounding, 0.07 · 100 is slightly above 7, but its ceil must be 7.
  numbers = np.arange(neg.shape[1] + 1)
  sizes = np.minimum(np.maximum(np.ceil(float(fraction) * (1 - 1e-7) * numbers - 1e-9), 1), numbers).astype(np.int32)
  _, index = jax.lax.top_k(masked(jax.lax.stop_gradient(neg), where), int(sizes[-1]))
  size = jnp.asarray(sizes)[jnp.sum(where, axis=1)]
  rows = jnp.arange(len(neg))[:, None]
  return neg.at[rows, index].get(unique_indices=True), jnp.arange(sizes[-1])[None] < size[:, None]
