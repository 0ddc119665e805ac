"""From scores and predictions to accuracies: per class, by thirds of a long tail, and over seeds."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from ssl_jax.evals import check

Array = TypeVar('Array', np.ndarray, jax.Array)


def percent(correct: ArrayLike) -> float:
  """The share of True in percent. The sum is divided last: 100 times a mean of 0.28 is 28.000000000000004.

  >>> percent([True] * 7 + [False] * 18)
  28.0
  """
  correct = np.asarray(correct, bool)
  return 100 * int(correct.sum()) / correct.size


def classes_before(scores: Array, labels: Array) -> Array:
  """The number of classes ranked before each example's own, ties to the lower class.  [n, c], [n] -> [n]

  If the own score is NaN, all classes come before it: a classifier that has diverged recognises nothing. Takes numpy
  and jax arrays.
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
  """Mean accuracy of the most frequent, the middle and the least frequent third of the classes in training.

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
