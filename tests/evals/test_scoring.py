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
