"""If a run keeps an average of its weights (`config.ema`), every evaluation uses the average."""

import dataclasses
import types

import chex
import jax
import numpy as np
import pytest

from ssl_jax.evals import finetune, transfer
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.run import builder
from ssl_jax.run.devices import AXIS
from ssl_jax.run.state import average_of
from ssl_jax.run.update import make_update
from tests.helpers import tiny


@pytest.fixture(scope='module')
def averaged(tmp_path_factory):
  """(evaluator, a state whose average differs from its weights and statistics, features computed with the average)"""
  changes = {'augment': dict(name='none'), 'eval.k': (1,), 'eval.batch_size': 32, 'eval.views': 2}
  prepared = builder.build(tiny(tmp_path_factory.mktemp('data'), ema=0.8, online_probe=0.1, **changes))
  state, rng = prepared.initial_state(), np.random.default_rng(0)
  far = lambda x: x + rng.uniform(0, 0.5, x.shape).astype(np.float32)
  average = jax.tree.map(far, average_of(state.params, state.batch_stats))
  images = jax.vmap(prepared.views.eval_view)(np.concatenate([prepared.train.items, prepared.eval_test.items]))
  found = jax.jit(prepared.method.features)({'network': average['network']}, average['batch_stats'], images)
  return ImageEvaluator(prepared), state.replace(extra={**state.extra, 'average': average}), found


@pytest.fixture(scope='module')
def updated(averaged):
  """The state after one step on the first 32 images, without augmentation."""
  evaluator, state, _ = averaged
  prepared, index = evaluator.run, np.arange(32, dtype=np.int32)
  settings = dict(seed=0, ema=0.8, online_probe=prepared.online_probe, axis_name=AXIS)
  same = [lambda key, image: prepared.views.eval_view(image)] * 2
  update = make_update(prepared.method, prepared.optimizer, prepared.learning_rate, same, **settings)
  batch = prepared.devices.shard((prepared.train.items[index], index))
  state, _ = prepared.devices.map(update, replicated=1, sharded=2)(prepared.devices.replicate(state), *batch)
  return prepared.devices.unreplicate(state)


def test_knn_during_training_uses_the_average(averaged):
  evaluator, state, features = averaged
  evaluator.scores(evaluator.run.devices.replicate(state))
  bank, queries, _ = evaluator.latest
  np.testing.assert_allclose(np.concatenate([bank, queries]), features['backbone'], rtol=1e-4, atol=1e-5)


def test_the_final_evaluation_uses_the_average(averaged, tmp_path):
  evaluator, state, features = averaged
  spaces, _ = evaluator.all_features(state, tmp_path / 'features')
  for layer, expected in features.items():
    found = np.concatenate([spaces[layer].train, spaces[layer].test])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(spaces[layer].views[0], expected[64:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('frozen', [False, True])
def test_classifiers_start_from_the_average(averaged, frozen):
  evaluator, state, _ = averaged
  untrained = dataclasses.replace(finetune.FULL, epochs=0)
  train = evaluator.run.train
  _, fitted = finetune._fit(evaluator.run, state, train, train.labels, 4, untrained, frozen, 0)
  found = evaluator.run.devices.unreplicate({'network': fitted['params']['encoder'], 'batch_stats': fitted['stats']})
  chex.assert_trees_all_equal(found, {name: x['encoder'] for name, x in state.extra['average'].items()})


def test_transfer_uses_the_average(averaged, tmp_path, monkeypatch):
  evaluator, state, _ = averaged
  stored = types.SimpleNamespace(newest=lambda: state, close=lambda: None)
  monkeypatch.setattr(transfer, 'Checkpoints', lambda workdir: stored)
  monkeypatch.setattr(transfer.files, 'saved', lambda workdir: True)
  found = transfer.encoder_of(evaluator.run.config, tmp_path).variables
  average = state.extra['average']
  expected = {'params': average['network']['encoder'], 'batch_stats': average['batch_stats']['encoder']}
  chex.assert_trees_all_equal(found, expected)


def test_weights_and_running_statistics_are_averaged(averaged, updated):
  _, before, _ = averaged
  newest = {'network': updated.params['network'], 'batch_stats': updated.batch_stats}
  expected = jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, before.extra['average'], newest)
  chex.assert_trees_all_close(updated.extra['average'], expected, rtol=1e-5, atol=1e-6)


def test_the_online_probe_trains_on_features_of_the_average(averaged, updated):
  evaluator, before, features = averaged
  probe, index = evaluator.run.online_probe, np.arange(32, dtype=np.int32)
  expected, _ = jax.jit(probe.update)(before.extra['probe'], features['backbone'][:32], index)
  chex.assert_trees_all_close(updated.extra['probe'], expected, rtol=1e-3, atol=1e-5)
