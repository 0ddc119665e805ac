"""Losses with weighted positives and negatives (CACR, Zheng et al. 2023), and losses with a margin.

The conventions are those of `ssl_jax.losses.contrastive`.
"""

import math

import jax
import jax.numpy as jnp

from ssl_jax.losses.base import contrastive_loss, over_negatives
from ssl_jax.losses.reductions import count, log_mean_exp_by_pair, logsumexp, masked, softmax_mean
from ssl_jax.registry import require, require_choice, require_positive


@contrastive_loss(
  no_temperature='t_pos and t_neg take its place',
  cosine_only='it takes 2 - 2s for the squared distance',
  separable=True,
  streamed=True,
)
def cacr(
  pos: jax.Array,
  neg: jax.Array,
  *,
  t_pos: float = 1.0,
  t_neg: float = 2.0,
  cost: str = 'euclidean',
  positive_weights: str = 'far',
  negative_weights: str = 'near',
  t_rbf: float = 2.0,
  stop_positive_weights: bool = False,
  where: jax.Array | None = None,
  view_pairs: int = 1,
  axis_name: str | None = None,
) -> jax.Array:
  """sum_k w⁺_k c(pos_k) - sum_j w⁻_j c(neg_j) (contrastive attraction and repulsion, CACR, Eq. 2-5).

  With d = 2 - 2 s, w⁺ = softmax(t_pos · d_pos) over the positives, and w⁻ = softmax(-t_neg · d_neg) over the negatives.

  - `cost`: c = d ('euclidean'), -s ('inner'), or 'rbf' (Eq. 13-14): c = d for the positives, and for the negatives
    the logarithm of the mean over all queries of sum_j w⁻_j e^(-t_rbf · d_j), the same value for every query. With
    `view_pairs` above 1, the mean is over the queries of one pair of views, as in `align_uniform`.
  - `positive_weights`, `negative_weights`: favor 'far' or 'near' samples (Table 10), or weight all samples equally with
    'uniform' (Table 11; both uniform: UAUR, Eq. 11).
  - `stop_positive_weights`: stops the gradient through w⁺, for positives from a momentum encoder (Alg. 3). Otherwise,
    gradients flow through all weights.

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(cacr(jnp.array([[0.9, 0.5]]), jnp.array([[0.1, -0.2]])))
  [-1.1869]
  """
  require_positive(t_pos=t_pos, t_neg=t_neg, t_rbf=t_rbf)
  require_choice('cost', cost, ('euclidean', 'inner', 'rbf'))
  signs = {'far': 1, 'near': -1, 'uniform': 0}
  for name, value in (('positive_weights', positive_weights), ('negative_weights', negative_weights)):
    require_choice(name, value, signs)

  d_pos = 2 - 2 * pos
  w_pos = jax.nn.softmax(signs[positive_weights] * t_pos * d_pos, axis=1)
  if stop_positive_weights:
    w_pos = jax.lax.stop_gradient(w_pos)
  attraction = jnp.sum(w_pos * (-pos if cost == 'inner' else d_pos), axis=1)

  def expected(neg, where):
    """sum_j w⁻_j c(neg_j); for 'rbf', its logarithm, and whether the query has negatives."""
    d_neg = 2 - 2 * neg
    logits = signs[negative_weights] * t_neg * d_neg
    if cost == 'rbf':
      return logsumexp(logits - t_rbf * d_neg, where) - logsumexp(logits, where), count(neg, where) > 0
    return softmax_mean(logits, -neg if cost == 'inner' else d_neg, where)

  if cost == 'rbf':
    found = over_negatives(expected, neg, where)
    return attraction + log_mean_exp_by_pair(*found, view_pairs=view_pairs, axis_name=axis_name)
  return attraction - over_negatives(expected, neg, where)


@contrastive_loss(
  no_temperature='t_pos and t_neg take its place',
  cosine_only='it takes 2 - 2s for the squared distance',
  streamed=True,
)
def cacr_margin(
  pos: jax.Array,
  neg: jax.Array,
  *,
  margin: float,
  t_pos: float = 1.0,
  t_neg: float = 2.0,
  cost: str = 'euclidean',
  positive_weights: str = 'far',
  negative_weights: str = 'near',
  stop_positive_weights: bool = False,
  where: jax.Array | None = None,
) -> jax.Array:
  """[sum_k w⁺_k c(pos_k) - sum_j w⁻_j c(neg_j) + margin]₊, `cacr` with a margin (CACR, B.5).

  With uniform weights, it is the generic triplet loss of mean costs; for t_pos, t_neg -> inf, it is `triplet`. The
  arguments are those of `cacr`, except that there is no RBF cost. Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(cacr_margin(jnp.array([[0.9, 0.5]]), jnp.array([[0.1, -0.2]]), margin=2.0))
  [0.8131]
  """
  require('margin', margin, lambda x: 0 <= x < math.inf, 'at least 0 and finite')
  require_choice('cost', cost, ('euclidean', 'inner'))
  weights = dict(positive_weights=positive_weights, negative_weights=negative_weights)
  settings = dict(t_pos=t_pos, t_neg=t_neg, cost=cost, stop_positive_weights=stop_positive_weights)
  return jax.nn.relu(cacr(pos, neg, where=where, **weights, **settings) + margin)


@contrastive_loss(no_temperature='a margin takes its place', cosine_only='it takes 2 - 2s for the squared distance')
def triplet(pos: jax.Array, neg: jax.Array, *, margin: float, where: jax.Array | None = None) -> jax.Array:
  """[max c(pos) - min c(neg) + margin]₊ with c = 2 - 2 s: the hardest positive and negative (CACR, B.5).

  Shapes: [Q] or [Q, K], [Q, M] -> [Q].

  >>> print(triplet(jnp.array([0.5]), jnp.array([[0.1, -0.2]]), margin=1.0))
  [0.2]
  """
  require('margin', margin, lambda x: 0 <= x < math.inf, 'at least 0 and finite')
  return jax.nn.relu(2 * jnp.max(masked(neg, where), axis=1) - 2 * jnp.min(pos, axis=1) + margin)
