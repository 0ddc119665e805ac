"""Contrastive losses as functions of similarities.

Each has the form `loss(pos, neg, ..., *, where=None) -> [Q]`, one value a query:

- `pos` `[Q, K]` or `[Q]`: similarities of each query with its K positives;
- `neg` `[Q, M]`: similarities with its negatives;
- `where` `[Q, M]`: False where `neg` is no negative;
- `temperature`, of the losses that have one: any `ssl_jax.temperature.Temperature`.

`ssl_jax.pairs` makes the first three from embeddings, or makes `neg` and `where` `pairs.Blocks`, with which a loss and
its gradient are the same and hold no [Q, M]. The mean over the queries is the loss of the paper. A loss whose
paper has one positive a query is, with K > 1, the mean over the K positives of the loss with that one positive.

Values are float32 (float64 for float64 similarities), finite down to temperatures of 0.01, with finite gradients. A
query without negatives is an error where `where` is known; inside jit, where it is not, its value and gradient are 0.

A few losses have a mean over all queries inside of them. They take `axis_name`, and are then exact over devices in the
sense of `ssl_jax.pairs`: differentiate the mean of this device, then `lax.pmean` the gradients.

The equations are those of "behaviour" (Wang & Liu 2021), "dystress" (Manna et al. 2024), "cacr" (Zheng et al. 2024),
"supervised" (Understanding self-supervised contrastive learning through supervised objectives, 2025), and of the papers
named in each function.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax import pairs
from ssl_jax import temperature as temperatures
from ssl_jax.temperature import Temperature, require, require_positive, scale


def _loss(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """What the losses share: the body sees float32 `pos` `[Q, K]`, `neg` and a full `where` `[Q, M]`.

  Of `pairs.Blocks` it sees one block of queries after the other. A loss with a mean over all queries, which takes
  `axis_name`, sees the `Blocks` as `neg` instead, and `where` None: what it needs of them it asks `_of_negatives` for.
  """
  signature = inspect.signature(function)

  def in_blocks(*args, **kwargs):
    given = signature.bind(*args, **kwargs).arguments
    blocks = given.pop('neg')
    by_query = {key: value for key, value in given.items() if np.ndim(value)}  # pos, and a temperature [Q]
    shared = {key: value for key, value in given.items() if key not in by_query}
    return blocks.map(lambda neg, where, mine: loss(neg=neg, where=where, **mine, **shared), by_query)

  @functools.wraps(function)
  def loss(pos, neg, *args, where=None, **kwargs):
    chex.assert_rank(pos, {1, 2})
    pos = pairs.to_float32(pos)
    pos = pos[:, None] if pos.ndim == 1 else pos
    if isinstance(neg, pairs.Blocks):
      chex.assert_equal_shape_prefix([pos, neg.queries], 1)
      if where is not None:
        raise ValueError(f'where, of shape {where.shape}, beside blocks, which have their own: give None')
      if 'axis_name' not in signature.parameters:
        return in_blocks(pos, neg, *args, **kwargs)
      some = neg.map(lambda _, where: where.any(axis=1))
      return jnp.where(some, function(pos, neg, *args, where=None, **kwargs), 0)
    chex.assert_rank(neg, 2)
    chex.assert_equal_shape_prefix([pos, neg], 1)
    neg = pairs.to_float32(neg)
    if 0 in (pos.shape[1], neg.shape[1]):
      raise ValueError(f'pos, neg = {pos.shape}, {neg.shape} lack columns: give each query a positive and a negative')
    if where is None:
      return function(pos, neg, *args, where=jnp.ones(neg.shape, bool), **kwargs)
    chex.assert_equal_shape([neg, where])
    if not isinstance(where, jax.core.Tracer) and not (some := np.asarray(where).any(axis=1)).all():
      raise ValueError(f'where = False for all of query {some.argmin()}: leave out the query or give it a negative')
    where = jnp.asarray(where, bool)
    return jnp.where(where.any(axis=1), function(pos, neg, *args, where=where, **kwargs), 0)

  return loss


@_loss
def info_nce(pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None) -> jax.Array:
  """-log(e^(pos/tau) / (e^(pos/tau) + sum e^(neg/tau))) (behaviour Eq. 1, dystress Eq. 1; InfoNCE, NT-Xent).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(info_nce(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5))
  [0.2721]
  """
  # -log(p / (p + n)) = softplus(log n - log p), which keeps its digits when the loss is small.
  negatives = _logsumexp(scale(neg, temperature), where)
  return jnp.mean(jax.nn.softplus(negatives[:, None] - scale(pos, temperature)), axis=1)


def multi_positive(
  pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None
) -> jax.Array:
  """The mean over K positives of `info_nce` with each, all with the same negatives.

  `info_nce` with `pos` [Q, K] under the name of the paper. Shapes: [Q, K], [Q, M] -> [Q].

  >>> print(multi_positive(jnp.array([[0.9, 0.5]]), jnp.array([[0.1, -0.2]]), 0.5))
  [0.4002]
  """
  return info_nce(pos, neg, temperature, where=where)


@_loss
def decoupled(pos: jax.Array, neg: jax.Array, temperature: Temperature, *, where: jax.Array | None = None) -> jax.Array:
  """-pos/tau + log sum e^(neg/tau) (DCL, Yeh et al. 2022; supervised Eq. 14).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(decoupled(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5))
  [-1.1625]
  """
  return _logsumexp(scale(neg, temperature), where) - jnp.mean(scale(pos, temperature), axis=1)


@_loss
def decoupled_weighted(
  pos: jax.Array,
  neg: jax.Array,
  temperature: Temperature,
  sigma: float = 0.5,
  *,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """-w pos/tau + log sum e^(neg/tau), w = 2 - e^(pos/sigma) / E[e^(pos/sigma)] (DCLW, Yeh et al. 2022).

  The expectation is over all positive pairs of the batch; no gradient passes through w.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(decoupled_weighted(jnp.array([0.9, 0.1]), jnp.zeros((2, 3)), 0.5))
  [0.4939 0.7658]
  """
  require_positive(sigma=sigma)
  logits = jax.lax.stop_gradient(pos) / sigma
  more = 1 - jnp.exp(logits - _log_mean_exp(logits, jnp.ones(pos.shape, bool), axis_name))  # w - 1
  return decoupled(pos, neg, temperature, where=where) - jnp.mean(more * scale(pos, temperature), axis=1)


@_loss
def simple(pos: jax.Array, neg: jax.Array, weight: float = 1.0, *, where: jax.Array | None = None) -> jax.Array:
  """-pos + weight · sum neg (behaviour Eq. 3).  [Q] or [Q, K], [Q, M] -> [Q]

  >>> print(simple(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-1.]
  """
  require_positive(weight=weight)
  return weight * jnp.sum(jnp.where(where, neg, 0), axis=1) - jnp.mean(pos, axis=1)


@_loss
def hard(
  pos: jax.Array, neg: jax.Array, temperature: Temperature, fraction: float, *, where: jax.Array | None = None
) -> jax.Array:
  """`info_nce` over the hardest negatives of each query (behaviour Eq. 8-9).

  These are the ceil(fraction · M) most similar, M counting the negatives that `where` keeps.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5, fraction=0.5))
  [0.1839]
  """
  hardest, where = _hardest(neg, where, fraction)
  return info_nce(pos, hardest, temperature, where=where)


@_loss
def hard_simple(
  pos: jax.Array, neg: jax.Array, fraction: float, weight: float = 1.0, *, where: jax.Array | None = None
) -> jax.Array:
  """`simple` over the hardest negatives of each query, those of `hard` (behaviour, sec. 5.5).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard_simple(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), fraction=0.5))
  [-0.8]
  """
  hardest, where = _hardest(neg, where, fraction)
  return simple(pos, hardest, weight, where=where)


@_loss
def balanced(pos: jax.Array, neg: jax.Array, alpha: float, lam: float, *, where: jax.Array | None = None) -> jax.Array:
  """-pos + lam · log(sum e^(alpha neg)) / alpha (balanced contrastive loss, supervised Eq. 17).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(balanced(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), alpha=2.0, lam=4.0))
  [0.375]
  """
  require_positive(alpha=alpha, lam=lam)
  return lam * _logsumexp(alpha * neg, where) / alpha - jnp.mean(pos, axis=1)


@_loss
def generalized_nt_xent(
  pos: jax.Array, neg: jax.Array, alpha: float, lam: float, *, where: jax.Array | None = None
) -> jax.Array:
  """-pos + lam · log(e^(alpha pos) + sum e^(alpha neg)) / alpha (supervised, sec. 6).

  With lam = 1 it is tau · `info_nce` at tau = 1 / alpha. Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(generalized_nt_xent(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), alpha=2.0, lam=1.0))
  [0.136]
  """
  require_positive(alpha=alpha, lam=lam)
  return jnp.mean(lam * jnp.logaddexp(alpha * pos, _logsumexp(alpha * neg, where)[:, None]) / alpha - pos, axis=1)


@_loss
def macl(
  pos: jax.Array,
  neg: jax.Array,
  tau0: float = 0.1,
  alpha: float = 0.5,
  threshold: float = 0.0,
  *,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """-log P / (1 - P), P = e^(pos/tau) / (e^(pos/tau) + sum e^(neg/tau)) (MACL, Huang et al. 2023).

  tau = tau0 (1 + alpha (mean of pos - threshold)) is `ssl_jax.temperature.macl`, with the mean over all positive pairs
  of the batch. No gradient passes through tau, nor through 1 / (1 - P). Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(macl(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), tau0=0.5))
  [1.2355]
  """
  tau = temperatures.macl(pos, tau0=tau0, alpha=alpha, threshold=threshold, axis_name=axis_name)
  x = _of_negatives(lambda neg, where: _logsumexp(neg / tau, where), neg, where)[:, None] - pos / tau
  # -log P = softplus(x) and 1 - P = sigmoid(x), whose quotient is 1 long before both vanish. As softplus' = sigmoid,
  # the gradient of the weighted loss with respect to x is exactly 1.
  value = jax.nn.softplus(y := jnp.maximum(x, -50)) / jax.nn.sigmoid(y)
  return jnp.mean(jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x)), axis=1)


@_loss
def hard_negative(
  pos: jax.Array,
  neg: jax.Array,
  temperature: Temperature,
  beta: float,
  tau_plus: float = 0.0,
  *,
  where: jax.Array | None = None,
) -> jax.Array:
  """-log(e^(pos/tau) / (e^(pos/tau) + G)) (HCL, Robinson et al. 2021; the HN-CL rows of cacr).

  G = max(M · (E_w[e^(neg/tau)] - tau_plus · e^(pos/tau)) / (1 - tau_plus), M · e^(-1/tau)), with weights
  w ∝ e^(beta · neg/tau) over the M negatives: beta stresses hard ones, tau_plus is the share of false ones.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(hard_negative(jnp.array([0.9]), jnp.array([[0.1, -0.2]]), 0.5, beta=1.0))
  [0.2921]
  """
  require('beta', beta, lambda x: 0 <= x < math.inf, 'give a beta of 0 or more')
  require('tau_plus', tau_plus, lambda x: 0 <= x < 1, 'give a tau_plus in [0, 1)')
  p, n = scale(pos, temperature), scale(neg, temperature)
  log_expected = (_logsumexp((1 + beta) * n, where) - _logsumexp(beta * n, where))[:, None]
  # log(E - tau_plus e^p), where the first exceeds the second; elsewhere the floor holds.
  difference = jnp.log(jnp.asarray(tau_plus, p.dtype)) + p - log_expected
  less = difference < -1e-30  # of a smaller one the derivative would not be finite
  debiased = log_expected + jnp.log(-jnp.expm1(jnp.where(less, difference, -1))) - jnp.log1p(-tau_plus)
  floor = scale(jnp.full_like(p, -1), temperature)
  log_count = jnp.log(jnp.maximum(jnp.sum(where, axis=1), 1).astype(p.dtype))[:, None]
  return jnp.mean(jax.nn.softplus(log_count + jnp.where(less, jnp.maximum(debiased, floor), floor) - p), axis=1)


@_loss
def align_uniform(
  pos: jax.Array,
  neg: jax.Array,
  t: float = 2.0,
  weight: float = 1.0,
  *,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """E‖x - x⁺‖² + weight · log E[e^(-t ‖x - x⁻‖²)], ‖x - y‖² = 2 - 2 s (Wang & Isola 2020; the AU-CL rows of cacr).

  The second expectation is over the negatives of all queries: each query has the same second term.
  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(align_uniform(jnp.array([0.9, 0.5]), jnp.zeros((2, 3))))
  [-3.8 -3. ]
  """
  require_positive(t=t, weight=weight)
  sums = lambda neg, where: (_logsumexp(t * (2 * neg - 2), where), jnp.sum(where, axis=1))
  return jnp.mean(2 - 2 * pos, axis=1) + weight * _log_mean_exp(*_of_negatives(sums, neg, where), axis_name)


@_loss
def cacr(
  pos: jax.Array,
  neg: jax.Array,
  t_pos: float = 1.0,
  t_neg: float = 2.0,
  cost: str = 'euclidean',
  positive_weights: str = 'far',
  negative_weights: str = 'near',
  t_rbf: float = 2.0,
  stop_positive_weights: bool = False,
  *,
  where: jax.Array | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  """sum_k w⁺_k c(pos_k) - sum_j w⁻_j c(neg_j) (contrastive attraction and repulsion, cacr Eq. 2-5).

  With d = 2 - 2 s, w⁺ = softmax(t_pos · d_pos) over the positives, and w⁻ = softmax(-t_neg · d_neg) over the negatives.

  - `cost`: c = d ('euclidean'), -s ('inner'), or 'rbf' (Eq. 13-14): c = d for the positives, and for the negatives
    the logarithm of the mean over all queries of sum_j w⁻_j e^(-t_rbf · d_j), one value that each query has.
  - the weights prefer 'far' samples, 'near' ones (Table 10), or none, 'uniform' (Table 11; both uniform: UAUR, Eq. 11).
  - the gradient flows through the weights, but not through w⁺ with `stop_positive_weights`, which is for positives
    from a momentum encoder (Alg. 3).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(cacr(jnp.array([[0.9, 0.5]]), jnp.array([[0.1, -0.2]])))
  [-1.1869]
  """
  require_positive(t_pos=t_pos, t_neg=t_neg, t_rbf=t_rbf)
  require('cost', cost, ('euclidean', 'inner', 'rbf').__contains__, "give 'euclidean', 'inner' or 'rbf'")
  signs = {'far': 1, 'near': -1, 'uniform': 0}
  for name, value in (('positive_weights', positive_weights), ('negative_weights', negative_weights)):
    require(name, value, signs.__contains__, "give 'far', 'near' or 'uniform'")

  d_pos = 2 - 2 * pos
  w_pos = jax.nn.softmax(signs[positive_weights] * t_pos * d_pos, axis=1)
  if stop_positive_weights:
    w_pos = jax.lax.stop_gradient(w_pos)
  attraction = jnp.sum(w_pos * (-pos if cost == 'inner' else d_pos), axis=1)

  def expected(neg, where):
    """sum_j w⁻_j c(neg_j), with 'rbf' the logarithm of its sum and whether there is a negative."""
    d_neg = 2 - 2 * neg
    log_w_neg = jax.nn.log_softmax(_masked(signs[negative_weights] * t_neg * d_neg, where), axis=1)
    if cost == 'rbf':
      return jax.nn.logsumexp(log_w_neg - t_rbf * d_neg, axis=1), where.any(axis=1)
    return jnp.sum(jnp.exp(log_w_neg) * (-neg if cost == 'inner' else d_neg), axis=1)

  if cost == 'rbf':
    return attraction + _log_mean_exp(*_of_negatives(expected, neg, where), axis_name)
  return attraction - _of_negatives(expected, neg, where)


@_loss
def triplet(pos: jax.Array, neg: jax.Array, margin: float, *, where: jax.Array | None = None) -> jax.Array:
  """[max c(pos) - min c(neg) + margin]₊ with c = 2 - 2 s: the hardest positive and negative (cacr, B.5).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(triplet(jnp.array([0.5]), jnp.array([[0.1, -0.2]]), margin=1.0))
  [0.2]
  """
  require('margin', margin, lambda x: 0 <= x < math.inf, 'give a margin of 0 or more')
  return jax.nn.relu(2 * jnp.max(_masked(neg, where), axis=1) - 2 * jnp.min(pos, axis=1) + margin)


def nt_xent(
  z1: jax.Array, z2: jax.Array, temperature: Temperature = 0.5, axis_name: str | None = None, block: int = 0
) -> jax.Array:
  """NT-Xent of SimCLR: `info_nce` of two views, with all other views of the batch as negatives.  [B, D] ×2 -> [2B]

  With a `block` of queries at a time it needs memory for block · 2B similarities instead of (2B)².

  >>> print(nt_xent(jnp.eye(2), jnp.eye(2), block=3))
  [0.2395 0.2395 0.2395 0.2395]
  """
  pos, neg, where = pairs.in_batch(z1, z2, axis_name=axis_name, block=block)
  return info_nce(pos, neg, temperature, where=where)


def penalties(neg: jax.Array, temperature: Temperature, where: jax.Array | None = None) -> jax.Array:
  """r = e^(neg/tau) / sum e^(neg/tau), the relative penalty on each negative (behaviour Eq. 5).  [Q, M] -> [Q, M]

  At a constant temperature it is the gradient of `info_nce` with respect to each negative over the one with respect to
  the positive, up to its sign. It is 0 where `where` is False.

  >>> print(penalties(jnp.array([[0.5, 0.0]]), 0.5))
  [[0.7311 0.2689]]
  """
  log_r, where = _log_penalties(neg, temperature, where)
  return jnp.where(where, jnp.exp(log_r), 0)


def penalty_entropy(neg: jax.Array, temperature: Temperature, where: jax.Array | None = None) -> jax.Array:
  """H(r) = -sum r log r of `penalties`, which grows with the temperature (behaviour, supplement sec. 2).  [Q, M] -> [Q]

  >>> print(penalty_entropy(jnp.array([[0.5, 0.0]]), 0.5))
  [0.5822]
  """
  log_r, where = _log_penalties(neg, temperature, where)
  log_r = jnp.where(where, log_r, 0)
  return -jnp.sum(jnp.where(where, jnp.exp(log_r) * log_r, 0), axis=1)


def _log_penalties(neg, temperature, where):
  if isinstance(neg, pairs.Blocks):
    raise ValueError(f'neg = blocks of {neg.block} queries, but penalties are a whole matrix: make pairs with block=0')
  chex.assert_rank(neg, 2)
  neg = pairs.to_float32(neg)
  where = jnp.ones(neg.shape, bool) if where is None else jnp.asarray(where, bool)
  chex.assert_equal_shape([neg, where])
  return jax.nn.log_softmax(_masked(scale(neg, temperature), where), axis=1), where


def _masked(x: jax.Array, where: jax.Array) -> jax.Array:
  """-inf where it is no negative. A query with none keeps all, so that its value, which is not used, is finite."""
  return jnp.where(where | ~where.any(axis=1, keepdims=True), x, -jnp.inf)


def _logsumexp(x: jax.Array, where: jax.Array) -> jax.Array:
  return jax.nn.logsumexp(_masked(x, where), axis=1)


def _of_negatives(function: Callable[..., Any], neg: jax.Array | pairs.Blocks, where: jax.Array | None) -> Any:
  """function(neg [Q, M], where [Q, M]) -> [Q, ...], block by block where `neg` is made so."""
  return neg.map(function) if isinstance(neg, pairs.Blocks) else function(neg, where)


def _log_mean_exp(x: jax.Array, counts: jax.Array, axis_name: str | None) -> jax.Array:
  """log(sum e^x / sum counts) over all with a count above 0 on all devices; e^x a sum of so many.  [...] -> []"""
  where, counts = counts.astype(bool), counts.astype(x.dtype)  # float, as the pairs of a large batch are more than 2^31
  shift = jnp.max(jax.lax.stop_gradient(x), where=where, initial=-jnp.inf)
  if axis_name is not None:
    shift = jax.lax.pmax(shift, axis_name)
  shift = jnp.where(jnp.isfinite(shift), shift, 0)
  total = jnp.sum(jnp.exp(jnp.where(where, x - shift, -jnp.inf)))
  count = jnp.sum(counts)
  if axis_name is not None:
    total, count = jax.lax.pmean((total, count), axis_name)
  return shift + jnp.log(jnp.where(count > 0, total, 1)) - jnp.log(jnp.where(count > 0, count, 1))


def _hardest(neg: jax.Array, where: jax.Array, fraction: float) -> tuple[jax.Array, jax.Array]:
  """The ceil(fraction · M) largest negatives of each query, M counted by `where`, and the mask of those."""
  require('fraction', fraction, lambda x: 0 < x <= 1, 'give a fraction in (0, 1]')
  # How many of 0, 1, ..., M, counted in float64: 0.07 · 100 is a little more than 7, and its ceil must be 7.
  sizes = np.ceil(fraction * np.arange(neg.shape[1] + 1) - 1e-9).astype(np.int32)
  _, index = jax.lax.top_k(_masked(jax.lax.stop_gradient(neg), where), int(sizes[-1]))
  size = jnp.asarray(sizes)[jnp.sum(where, axis=1)]
  return jnp.take_along_axis(neg, index, axis=1), jnp.arange(sizes[-1])[None] < size[:, None]
