"""Accuracies from scores and predictions, against a sort, scikit-learn and values computed by hand."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn import metrics as sklearn_metrics

from ssl_jax.evals import scoring


class ScoringTest(chex.TestCase):
  def test_confusion_and_per_class_accuracy_equal_scikit_learn(self):
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(5, size=200), rng.integers(5, size=200)
    matrix = scoring.confusion(predictions, labels, 5)
    np.testing.assert_array_equal(matrix, sklearn_metrics.confusion_matrix(labels, predictions))
    recall = 100 * sklearn_metrics.recall_score(labels, predictions, average=None)
    np.testing.assert_allclose(scoring.per_class_accuracy(matrix), recall)

  def test_a_class_without_examples_has_no_accuracy(self):
    accuracy = scoring.per_class_accuracy(scoring.confusion([0, 1, 1], [0, 0, 1], 3))
    np.testing.assert_array_equal(accuracy, [50, 100, np.nan])

  def test_head_middle_tail_are_thirds_by_training_frequency(self):
    groups = scoring.head_middle_tail([10.0, 20, 30, 40, 50, 60, 70], [5, 400, 30, 2, 100, 90, 1])
    # Most frequent first: 20, 50, 60 | 30, 10 | 40, 70.
    self.assertEqual(groups, {'head': 130 / 3, 'middle': 20.0, 'tail': 55.0})

  def test_mean_and_spread(self):
    mean, spread = scoring.mean_and_spread([80.0, 82.0, 84.0])
    self.assertEqual((mean, spread), (82.0, 2.0))
    self.assertEqual(scoring.mean_and_spread([80.0]), (80.0, None))


@pytest.mark.parametrize(
  'call,message',
  [
    (lambda: scoring.confusion([0, 3], [0, 1], 3), 'predictions: class 3, expected less than num_classes = 3'),
    (lambda: scoring.head_middle_tail([1.0, 2.0], [1, 2]), 'train_counts: shape'),
    (lambda: scoring.mean_and_spread([]), 'values: shape'),
  ],
)
def test_bad_input_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@given(arrays.arrays(np.float32, (7, 4), elements=st.sampled_from([0.0, 1.0, 2.0, -np.inf])), st.integers(0, 2**31))
def test_classes_before_are_those_of_a_stable_sort(scores, seed):
  labels = np.random.default_rng(seed).integers(4, size=7)
  order = np.argsort(-scores, axis=1, kind='stable')
  expected = [list(row).index(label) for row, label in zip(order, labels, strict=True)]
  np.testing.assert_array_equal(scoring.classes_before(scores, labels), expected)


@pytest.mark.parametrize('xp', [np, jnp])
def test_nan_scores_are_not_hits(xp):
  scores = xp.asarray([[np.nan] * 3, [1.0, np.nan, 0.0], [np.nan, 2.0, 1.0]], np.float32)
  np.testing.assert_array_equal(scoring.classes_before(scores, xp.asarray([0, 1, 1])), [3, 3, 1])


def test_mean_per_class_counts_each_class_once():
  scores, labels = np.eye(3)[[0, 0, 0, 1, 2, 2]], np.array([0, 0, 0, 0, 2, 1])
  assert scoring.accuracy(scores, labels) == pytest.approx(100 * 4 / 6)
  assert scoring.mean_per_class(scores, labels) == pytest.approx((75 + 100 + 0) / 3)
  assert scoring.mean_per_class(scores[:4], labels[:4]) == 75, 'classes that do not occur have no part in it'


def test_average_precision_is_that_of_voc_2007():
  """By hand: hits at places 1, 3 and 5 have precisions 1, 2/3 and 3/5 at recalls 1/3, 2/3 and 1."""
  scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4], [0.5, 0.5]])
  targets = np.array([[1, 0], [0, 0], [1, 0], [0, 0], [1, 0]], bool)
  expected = 100 * (4 * 1 + 3 * 2 / 3 + 4 * 3 / 5) / 11  # recalls 0 to 0.3, to 0.6, to 1
  assert scoring.mean_average_precision(scores, targets) == pytest.approx(expected)
  targets[4, 1] = True  # the best of the second class, which was left out
  assert scoring.mean_average_precision(scores, targets) == pytest.approx((expected + 100) / 2)


def test_roc_auc_is_the_share_of_pairs_in_order():
  rng = np.random.default_rng(0)
  scores, labels = rng.normal(size=(30, 2)).round(1), rng.integers(2, size=30)
  margin = scores[:, 1] - scores[:, 0]
  pairs = [(a > b) + (a == b) / 2 for a in margin[labels == 1] for b in margin[labels == 0]]
  assert scoring.roc_auc(scores, labels) == pytest.approx(100 * np.mean(pairs))
