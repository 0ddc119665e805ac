"""The representation metrics as loops over pairs, in float64: slow, and easy to check against the papers."""

import itertools
import math

import numpy as np


def unit(x):
  x = np.asarray(x, np.float64)
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def ordered_pairs(n):
  return itertools.permutations(range(n), 2)


def uniformity(x, t):
  x = unit(x)
  return math.log(np.mean([math.exp(-t * np.sum((x[i] - x[j]) ** 2)) for i, j in ordered_pairs(len(x))]))


def alignment(views):
  views = unit(views)
  pairs = ordered_pairs(len(views))
  return np.mean([np.sum((views[v, i] - views[w, i]) ** 2) for v, w in pairs for i in range(views.shape[1])])


def tolerance(x, labels):
  x = unit(x)
  return np.mean([x[i] @ x[j] * (labels[i] == labels[j]) for i, j in ordered_pairs(len(x))])


def same_label_similarity(x, labels):
  x = unit(x)
  return np.mean([x[i] @ x[j] for i, j in ordered_pairs(len(x)) if labels[i] == labels[j]])


def class_means(x, labels):
  return {c: np.mean([row for row, label in zip(x, labels, strict=True) if label == c], axis=0) for c in set(labels)}


def inter_class_uniformity(x, labels, t):
  means = list(class_means(unit(x), labels.tolist()).values())
  return math.log(np.mean([math.exp(-t * np.sum((a - b) ** 2)) for a, b in itertools.permutations(means, 2)]))


def prototype_bias(views, labels):
  surrogate = unit(views).mean(axis=0)
  means = class_means(surrogate, labels.tolist())
  return np.mean([np.linalg.norm(means[c] - x) for x, c in zip(surrogate, labels.tolist(), strict=True)])


def prototype_bias_pairs(views, labels):
  """The expectation of the sampled estimate: every view, every x, every x′ of its class (itself included)."""
  views = unit(views)
  per_example = []
  for i, c in enumerate(labels):
    members = np.flatnonzero(labels == c)
    per_example.append(np.mean([np.linalg.norm(view[j] - view[i]) for view in views for j in members]))
  return np.mean(per_example)


def cosine(a, b):
  return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def attracting_gap(query, views):
  gaps = []
  for i, q in enumerate(unit(query)):
    others = unit(views)[:, i]
    left = -cosine(q, others.mean(axis=0))
    right = -np.mean([cosine(q, other) for other in others])
    gaps.append(right - left)
  return np.mean(gaps)


def repelling_gap(query, query_labels, bank, bank_labels, alpha):
  """RHS − LHS of Eq. 10 as it is printed, which supposes balanced classes."""
  bank, means = unit(bank), class_means(unit(bank), bank_labels.tolist())
  gaps = []
  for q, y in zip(unit(query), query_labels.tolist(), strict=True):
    others = [mean for c, mean in means.items() if c != y]
    nu = min(np.linalg.norm(mean) for mean in others)
    left = max(cosine(q, mean) for mean in others)
    right = math.log(np.mean([math.exp(alpha * (q @ b)) for b in bank])) / (nu * alpha)
    gaps.append(right + math.log(len(means)) / (nu * alpha) - left)
  return np.mean(gaps)


def softmax_entropy(logits):
  p = np.exp(np.asarray(logits) - max(logits))
  p /= p.sum()
  return -sum(q * math.log(q) for q in p if q > 0), p


def penalty_entropy(x, tau):
  x = unit(x)
  entropies = []
  for i in range(len(x)):
    s = [x[i] @ x[j] for j in range(len(x)) if j != i]
    entropies.append(softmax_entropy([value / tau(value) for value in s])[0])
  return np.mean(entropies)


def conditional_entropy(x, t_neg):
  x = unit(x)
  entropies = []
  for i in range(len(x)):
    entropies.append(softmax_entropy([-t_neg * np.sum((x[i] - x[j]) ** 2) for j in range(len(x)) if j != i])[0])
  return np.mean(entropies)


def penalty_distribution(x, tau, bins):
  x = unit(x)
  total = np.zeros(bins)
  for i in range(len(x)):
    s = [x[i] @ x[j] for j in range(len(x)) if j != i]
    _, r = softmax_entropy([value / tau(value) for value in s])
    for value, weight in zip(s, r, strict=True):
      total[min(int((value + 1) / 2 * bins), bins - 1)] += weight
  return total / len(x)


def local_separation(anchors, positives, k):
  anchors, positives = unit(anchors), unit(positives)
  rows = []
  for i in range(len(anchors)):
    negatives = sorted((anchors[i] @ positives[j] for j in range(len(anchors)) if j != i), reverse=True)
    rows.append([anchors[i] @ positives[i], *negatives[:k]])
  return np.array(rows)


def similarity_histograms(anchors, positives, labels, bins):
  anchors, positives = unit(anchors), unit(positives)
  counts = {name: np.zeros(bins, int) for name in ('TP', 'FN', 'TN')}
  for i in range(len(anchors)):
    for j in range(len(anchors)):
      name = 'TP' if i == j else 'FN' if labels[i] == labels[j] else 'TN'
      counts[name][min(int((anchors[i] @ positives[j] + 1) / 2 * bins), bins - 1)] += 1
  return counts


def rankme(x):
  sigma = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
  p = sigma / sigma.sum() + 1e-7
  return math.exp(-sum(q * math.log(q) for q in p))


def lidar(views, delta):
  views = np.asarray(views, np.float64)
  v, n, d = views.shape
  means = [sum(views[:, i]) / v for i in range(n)]
  centre = sum(means) / n
  between, within = np.zeros((d, d)), delta * np.eye(d)
  for i in range(n):
    between += np.outer(means[i] - centre, means[i] - centre) / n
    for view in views[:, i]:
      within += np.outer(view - means[i], view - means[i]) / (n * v)
  values, vectors = np.linalg.eigh(within)
  root = vectors @ np.diag(values**-0.5) @ vectors.T
  eigenvalues = np.maximum(np.linalg.eigvalsh(root @ between @ root), 0)
  p = eigenvalues / eigenvalues.sum() + 1e-8
  return math.exp(-sum(q * math.log(q) for q in p))
