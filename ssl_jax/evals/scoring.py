"""Accuracies from scores and predictions: overall, per class, for head, middle and tail classes, and over seeds."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
import scipy.stats
from jax.typing import ArrayLike

from ssl_jax.evals import check

Array = TypeVar('Array', np.ndarray, jax.Array)


def percent(correct: ArrayLike) -> float:
  """The share of True in percent. Division comes last, because 100 times a mean of 0.28 is 28.000000000000004.

  >>> percent([True] * 7 + [False] * 18)
  28.0
  """
  correct = np.asarray(correct, bool)
  return 100 * int(correct.sum()) / correct.size


def classes_before(scores: Array, labels: Array) -> Array:
  """The number of classes ranked before the true class. Ties go to the lower class.  [n, c], [n] -> [n]

  If the score of the true class is NaN, all classes count as before it, so a diverged classifier is never correct.
  Takes numpy and jax arrays.
  """
  xp = scores.__array_namespace__()
  own = xp.take_along_axis(scores, labels[:, None], axis=1)
  after = (scores < own) | ((scores == own) & (xp.arange(scores.shape[1])[None, :] >= labels[:, None]))
  return xp.sum(~after, axis=1)


def confusion(predictions: ArrayLike, labels: ArrayLike, num_classes: int) -> np.ndarray:
  """Counts of (true class, predicted class).  [n], [n] -> [num_classes, num_classes]"""
  predictions, labels = np.asarray(predictions), np.asarray(labels)
  predictions = check.labels('predictions', predictions, len(predictions), classes=1)
  labels = check.labels('labels', labels, len(predictions), classes=1)
  for name, values in (('predictions', predictions), ('labels', labels)):
    if values.max() >= num_classes:
      raise ValueError(f'{name}: class {values.max()}, expected less than num_classes = {num_classes}')
  return np.bincount(labels * num_classes + predictions, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class_accuracy(matrix: np.ndarray) -> np.ndarray:
  """Accuracy of each class in percent, NaN for a class without examples.  confusion [c, c] -> [c]"""
  totals = matrix.sum(axis=1)
  return np.where(totals > 0, 100 * np.diag(matrix) / np.maximum(totals, 1), np.nan)


def head_middle_tail(per_class: ArrayLike, train_counts: ArrayLike) -> dict[str, float]:
  """Mean accuracy of the most frequent, the middle and the least frequent third of the training classes.

  Classes with equal counts keep their order. If the thirds are unequal, the head is the largest, then the middle.
  """
  per_class, train_counts = np.asarray(per_class), np.asarray(train_counts)
  if per_class.shape != train_counts.shape or per_class.ndim != 1 or len(per_class) < 3:
    raise ValueError(
      f'train_counts: shape {train_counts.shape}, expected {per_class.shape}, one for each of at least 3 classes'
    )
  thirds = np.array_split(per_class[np.argsort(-train_counts, kind='stable')], 3)
  return {name: float(third.mean()) for name, third in zip(('head', 'middle', 'tail'), thirds, strict=True)}


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
  """Mean and sample standard deviation (n − 1) over seeds; the deviation of one seed is None."""
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or not len(values):
    raise ValueError(f'values: shape {values.shape}, expected one number for each seed')
  return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


# The metrics for transfer, in percent. They take scores [n, c] and targets, which are classes [n] or, if images have
# several labels, bools [n, c].


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
  """The share of examples whose true class has the highest score.  [n, c], [n]"""
  return percent(classes_before(scores, targets) < 1)


def mean_per_class(scores: np.ndarray, targets: np.ndarray) -> float:
  """The mean of the class accuracies, over the classes that occur.  [n, c], [n]"""
  correct = classes_before(scores, targets) < 1
  return float(np.mean([percent(correct[targets == c]) for c in np.unique(targets)]))


def mean_average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
  """mAP of VOC 2007: the mean over classes of the 11-point average precision.  [n, c], bool [n, c]

  The points are recalls 0, 0.1, ..., 1, each with the best precision at that or a higher recall. Classes without
  examples are left out. Examples with equal scores are ranked in their order.
  """
  found = []
  for of_class, is_class in zip(scores.T, np.asarray(targets, bool).T, strict=True):
    if not is_class.any():
      continue
    hits = is_class[np.argsort(-of_class, kind='stable')]
    precision, recall = np.cumsum(hits) / np.arange(1, len(hits) + 1), np.cumsum(hits) / hits.sum()
    at_least = [precision[recall >= level - 1e-12] for level in np.linspace(0, 1, 11)]
    found.append(np.mean([reached.max() for reached in at_least]))
  return 100 * float(np.mean(found))


def roc_auc(scores: np.ndarray, targets: np.ndarray) -> float:
  """The share of pairs of both classes in which class 1 scores higher; ties count one half.  [n, 2], [n]"""
  ranks = scipy.stats.rankdata(np.float64(scores[:, 1]) - np.float64(scores[:, 0]))
  second = np.asarray(targets) == 1
  pairs = int(second.sum()) * int((~second).sum())
  return 100 * float(ranks[second].sum() - second.sum() * (second.sum() + 1) / 2) / pairs


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
  'accuracy': accuracy,
  'mean_per_class': mean_per_class,
  'map': mean_average_precision,
  'roc_auc': roc_auc,
}
