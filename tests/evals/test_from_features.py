"""Features of any kind can be evaluated, including those of a collapsed encoder, when it matters most."""

import json

import numpy as np
import pytest

from configs import base
from ssl_jax.evals import from_features
from tests.reference import pairwise as reference

LABELS = np.arange(40) % 4
COLLAPSED = {
  'constant': np.ones((40, 6), np.float32),
  'zero': np.zeros((40, 6), np.float32),
  'a plane': np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32) @ np.eye(2, 6, dtype=np.float32),
}


@pytest.mark.parametrize('features', COLLAPSED.values(), ids=COLLAPSED)
@pytest.mark.slow
def test_a_collapsed_encoder_is_evaluated_without_undefined_measures(features):
  settings = base.get_config().eval.to_dict() | {'k': (5,)}
  views = np.stack([features[:8]] * 4)
  spaces = {name: from_features.Space(features, features, views) for name in ('backbone', 'projector')}
  numbers, arrays = from_features.evaluate_features(
    spaces,
    from_features.Labels(LABELS, LABELS, LABELS[:8]),
    settings,
    loss=from_features.LossSettings(temperature=0.5),
  )
  found = json.loads(json.dumps(numbers, allow_nan=False))['measures']['projector']
  assert 'alpha_req' not in found
  assert found['alignment'] == pytest.approx(0, abs=1e-5)
  assert found['rankme'] < 2.1
  assert all(np.isfinite(x).all() for x in arrays.values())


def test_one_image_per_class_has_no_same_label_similarity():
  x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  labels = np.arange(8)
  space, classes = from_features.Space(x, x), from_features.Labels(labels, labels)
  found = from_features.measures(space, classes, from_features.LossSettings())
  assert 'same_label_similarity' not in found
  assert 'uniformity' in found


def test_measures_use_the_settings_of_the_loss():
  rng = np.random.default_rng(0)
  test, bank = rng.normal(size=(40, 6)).astype(np.float32), rng.normal(size=(60, 6)).astype(np.float32)
  views, labels = test[:8] + rng.normal(size=(3, 8, 6)).astype(np.float32), np.arange(60) % 4
  space = from_features.Space(test, test, views, bank=bank)
  classes = from_features.Labels(LABELS, LABELS, LABELS[:8], bank=labels)
  for alpha, t_neg, batch in ((2.0, 2.0, 768), (5.0, 0.9, 10)):
    loss = from_features.LossSettings(alpha=alpha, t_neg=t_neg, batch_size=batch)
    found = from_features.measures(space, classes, loss)
    gap = reference.repelling_gap(views[0], LABELS[:8], bank, labels, alpha)
    assert found['repelling_gap'] == pytest.approx(gap, rel=1e-4)
    shuffled = test[np.random.default_rng(0).permutation(40)]
    batches = np.split(shuffled, 40 // min(batch, 40))
    entropy = np.mean([reference.conditional_entropy(x, t_neg) for x in batches])
    assert found['conditional_entropy'] == pytest.approx(entropy, rel=1e-4)
    expected = {'t_neg': t_neg, 'batch_size': min(batch, 40), 'alpha': alpha, 'bank': 60}
    assert from_features.measure_settings(space, loss) == expected
