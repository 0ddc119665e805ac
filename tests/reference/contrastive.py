"""The contrastive losses, one query, one positive and one negative at a time.

`pos` is a list of rows of K similarities, `neg` a list of rows of the similarities that are negatives, rows of any
length. Each function returns one value a query. A temperature is a number. `fixed`, where a paper lets no gradient pass
through something, is the (pos, neg) from which that something is computed, so that a difference quotient can hold it.
"""

import math


def mean(values):
  values = list(values)
  return math.fsum(values) / len(values)


def info_nce(pos, neg, tau):
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    n = math.fsum(math.exp(s / tau) for s in negatives)
    losses.append(mean(math.log1p(n / math.exp(s / tau)) for s in positives))  # -log(p / (p + n))
  return losses


def decoupled(pos, neg, tau):
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    n = math.fsum(math.exp(s / tau) for s in negatives)
    losses.append(mean(-s / tau + math.log(n) for s in positives))
  return losses


def decoupled_weighted(pos, neg, tau, sigma=0.5, fixed=None):
  fixed_pos, _ = fixed or (pos, neg)
  normalizer = mean(math.exp(s / sigma) for row in fixed_pos for s in row)
  losses = []
  for positives, fixed_positives, negatives in zip(pos, fixed_pos, neg, strict=True):
    n = math.fsum(math.exp(s / tau) for s in negatives)
    weights = [2 - math.exp(s / sigma) / normalizer for s in fixed_positives]
    losses.append(mean(-w * s / tau + math.log(n) for w, s in zip(weights, positives, strict=True)))
  return losses


def simple(pos, neg, weight):
  return [-mean(positives) + weight * math.fsum(negatives) for positives, negatives in zip(pos, neg, strict=True)]


def hardest(neg, fraction):
  return [sorted(negatives)[-math.ceil(fraction * len(negatives)) :] for negatives in neg]


def hard(pos, neg, tau, fraction):
  return info_nce(pos, hardest(neg, fraction), tau)


def hard_simple(pos, neg, fraction, weight):
  return simple(pos, hardest(neg, fraction), weight)


def balanced(pos, neg, alpha, lam):
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    repelling = math.log(math.fsum(math.exp(alpha * s) for s in negatives)) / alpha
    losses.append(mean(-s + lam * repelling for s in positives))
  return losses


def generalized_nt_xent(pos, neg, alpha, lam):
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    n = math.fsum(math.exp(alpha * s) for s in negatives)
    losses.append(mean(-s + lam * math.log(math.exp(alpha * s) + n) / alpha for s in positives))
  return losses


def macl(pos, neg, tau0, alpha=0.5, threshold=0.0, fixed=None):
  fixed_pos, fixed_neg = fixed or (pos, neg)
  tau = tau0 * (1 + alpha * (mean(s for row in fixed_pos for s in row) - threshold))
  weights = []
  for positives, negatives in zip(fixed_pos, fixed_neg, strict=True):
    n = math.fsum(math.exp(s / tau) for s in negatives)
    weights.append([(math.exp(s / tau) + n) / n for s in positives])  # 1 / (1 - P)
  losses = []
  for positives, negatives, row in zip(pos, neg, weights, strict=True):
    n = math.fsum(math.exp(s / tau) for s in negatives)
    losses.append(mean(w * math.log1p(n / math.exp(s / tau)) for w, s in zip(row, positives, strict=True)))
  return losses


def hard_negative(pos, neg, tau, beta, tau_plus=0.0, least=None):
  """`least` is s / tau at s = -1, which is not -1 / tau where the similarities are scaled already."""
  least = -1 / tau if least is None else least
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    m = len(negatives)
    weights = [math.exp(beta * s / tau) for s in negatives]
    weights = [w / math.fsum(weights) for w in weights]
    expected = math.fsum(w * math.exp(s / tau) for w, s in zip(weights, negatives, strict=True))
    values = []
    for s in positives:
      p = math.exp(s / tau)
      g = max((m * expected - tau_plus * m * p) / (1 - tau_plus), m * math.exp(least))
      values.append(math.log1p(g / p))
    losses.append(mean(values))
  return losses


def align_uniform(pos, neg, t, weight=1.0):
  uniformity = math.log(mean(math.exp(-t * (2 - 2 * s)) for negatives in neg for s in negatives))
  return [mean(2 - 2 * s for s in positives) + weight * uniformity for positives in pos]


def softmax(values):
  values = list(values)
  exps = [math.exp(v - max(values)) for v in values]
  return [e / math.fsum(exps) for e in exps]


def cacr(pos, neg, t_pos, t_neg, cost='euclidean', positive_weights='far', negative_weights='near', t_rbf=2.0):
  sign = {'far': 1, 'near': -1, 'uniform': 0}
  c = {'euclidean': lambda s: 2 - 2 * s, 'rbf': lambda s: 2 - 2 * s, 'inner': lambda s: -s}[cost]
  attractions, repulsions = [], []
  for positives, negatives in zip(pos, neg, strict=True):
    w_pos = softmax(sign[positive_weights] * t_pos * (2 - 2 * s) for s in positives)
    w_neg = softmax(sign[negative_weights] * t_neg * (2 - 2 * s) for s in negatives)
    attractions.append(math.fsum(w * c(s) for w, s in zip(w_pos, positives, strict=True)))
    if cost == 'rbf':
      repulsions.append(math.fsum(w * math.exp(-t_rbf * (2 - 2 * s)) for w, s in zip(w_neg, negatives, strict=True)))
    else:
      repulsions.append(-math.fsum(w * c(s) for w, s in zip(w_neg, negatives, strict=True)))
  if cost == 'rbf':
    repulsions = [math.log(mean(repulsions))] * len(pos)
  return [a + r for a, r in zip(attractions, repulsions, strict=True)]


def cacr_margin(pos, neg, margin, t_pos, t_neg, cost='euclidean', positive_weights='far', negative_weights='near'):
  values = cacr(pos, neg, t_pos, t_neg, cost, positive_weights, negative_weights)
  return [max(0.0, value + margin) for value in values]


def false_negatives(scores, top, threshold):
  """Which of a row of scores are among the highest `top` and above the threshold."""
  found = []
  for row in scores:
    order = sorted(range(len(row)), key=lambda j: -row[j])
    found.append([j in order[:top] and row[j] > threshold for j in range(len(row))])
  return found


def fnc(pos, neg, false, tau, attract=True):
  losses = []
  for positives, negatives, flags in zip(pos, neg, false, strict=True):
    kept = [s for s, flag in zip(negatives, flags, strict=True) if attract or not flag]
    total = math.log(math.fsum(math.exp(s / tau) for s in [*positives, *kept]))
    drawn = [*positives, *(s for s, flag in zip(negatives, flags, strict=True) if flag and attract)]
    losses.append(mean(total - s / tau for s in drawn))
  return losses


def triplet(pos, neg, margin):
  return [
    max(0.0, max(2 - 2 * s for s in positives) - min(2 - 2 * s for s in negatives) + margin)
    for positives, negatives in zip(pos, neg, strict=True)
  ]


def penalties(neg, tau):
  return [softmax(s / tau for s in negatives) for negatives in neg]


def sigmoid(pos, neg, tau, bias):
  softplus = lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x)))  # -log sigmoid(-x)
  losses = []
  for positives, negatives in zip(pos, neg, strict=True):
    attracted = mean(softplus(-(s / tau + bias)) for s in positives)
    losses.append(attracted + math.fsum(softplus(s / tau + bias) for s in negatives))
  return losses
