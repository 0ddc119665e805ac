"""The attempts of the race to 90 %: each builds, takes two steps at a small size, and ends with kNN alone."""

import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base
from experiments.speedrun.sweep import ATTEMPTS, SWEEP
from ssl_jax import config, train
from ssl_jax.workdir import metric_log
from tests.page import narrower


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  rng = np.random.default_rng(0)
  images, labels = rng.integers(0, 256, (48, 32, 32, 3), np.uint8), np.arange(48) % 4
  file = tmp_path_factory.mktemp('data') / 'images.npz'
  np.savez(file, train_images=images[:32], train_labels=labels[:32], test_images=images[32:], test_labels=labels[32:])
  return file


def test_no_attempt_evaluates_more_than_it_must():
  for row in SWEEP.rows:
    chosen = SWEEP.resolve(row, 0)
    assert chosen['eval']['k'] == (10,) and chosen['eval']['features'] == 'backbone', row.name
    assert not chosen['eval']['every_epochs'] and not chosen['eval']['at_end'] and not chosen['log']['tensorboard']


@pytest.mark.slow
@pytest.mark.parametrize('row', ATTEMPTS, ids=lambda row: row.name)
def test_an_attempt_takes_two_steps(row, data, tmp_path):
  chosen = ConfigDict(SWEEP.resolve(row, 0))
  size = max(16, chosen.augment.get('size') or 0)
  changes = {'batch_size': 8, 'steps': 2, 'optimizer.warmup_epochs': 0.0, 'parallel.devices': 1, **narrower(chosen)}
  changes |= {'data.source': 'arrays', 'data.path': str(data), 'data.cache': '', 'data.image_size': size}
  changes |= {'log.every_steps': 1, 'eval.batch_size': 16}
  changes |= {'augment.jitter': 0.0, 'augment.grey': 0.0, 'model.stage_sizes': (1, 1)}  # little to compile
  for key, value in changes.items():
    config.override(chosen, key, value)
  config.validate(chosen, base.get_config())
  summary = train.train(chosen, tmp_path / 'run')
  assert 0 <= summary['knn10'] <= 100 and 0 <= summary['knn10_white'] <= 100
  assert 0 < summary['compile_seconds'] <= summary['seconds'] + 0.1
  losses = [row['loss'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row]
  assert len(losses) == 2 and all(map(math.isfinite, losses))
