"""Features of any kind can be evaluated, including those of a collapsed encoder, when it matters most."""

import json

import numpy as np
import pytest

from configs import base
from ssl_jax.evals import from_features

LABELS = np.arange(40) % 4
COLLAPSED = {
  'constant': np.ones((40, 6), np.float32),
  'zero': np.zeros((40, 6), np.float32),
  'a plane': np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32) @ np.eye(2, 6, dtype=np.float32),
}


@pytest.mark.parametrize('features', COLLAPSED.values(), ids=COLLAPSED)
def test_a_collapsed_encoder_is_evaluated_without_undefined_measures(features):
  settings = base.get_config().eval.to_dict() | {'k': (5,)}
  views = np.stack([features[:8]] * 4)
  spaces = {name: from_features.Space(features, features, views) for name in ('backbone', 'projector')}
  numbers, arrays = from_features.evaluate_features(
    spaces, from_features.Labels(LABELS, LABELS, LABELS[:8]), settings, temperature=0.5
  )
  found = json.loads(json.dumps(numbers, allow_nan=False))['measures']['projector']
  assert 'alpha_req' not in found
  assert found['alignment'] == pytest.approx(0, abs=1e-5)
  assert found['rankme'] < 2.1
  assert all(np.isfinite(x).all() for x in arrays.values())


def test_one_image_per_class_has_no_same_label_similarity():
  x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  labels = np.arange(8)
  found = from_features.measures(from_features.Space(x, x), from_features.Labels(labels, labels), None)
  assert 'same_label_similarity' not in found
  assert 'uniformity' in found
