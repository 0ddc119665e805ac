"""Encoders trained on labels: which labels, which weights, what is trained, and the same on any devices."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from ssl_jax import run
from ssl_jax.evals import evaluate, features, finetune, linear
from tests.test_train import tiny

SHORT = dataclasses.replace(finetune.FULL, epochs=4, milestones=(3,), learning_rate=0.05, batch=16)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """(devices -> run, the state of an untrained encoder)"""
  folder = tmp_path_factory.mktemp('data')
  parts = functools.cache(lambda devices: run.prepare(tiny(folder, **{'parallel.devices': devices})))
  return parts, parts(1).initial_state()


def fit(prepared, devices, protocol, *, frozen):
  parts, state = prepared
  chosen = parts(devices)
  labels = chosen.train.labels
  _, fitted = finetune._fit(chosen, state, chosen.train, labels, 4, protocol, frozen, 0)
  return chosen.devices.unreplicate((fitted['params'], fitted['stats']))


def test_shares_are_of_each_class_and_shots_are_exact():
  labels = np.repeat([0, 1, 2], [200, 40, 5])
  for which, counts in {'all': [200, 40, 5], '10%': [20, 4, 1], '1%': [2, 1, 1], '5-shot': [5, 5, 5]}.items():
    chosen = finetune.chosen_labels(labels, which, seed=0)
    assert np.bincount(labels[chosen]).tolist() == counts
    assert len(set(chosen)) == len(chosen)
  first, second = (finetune.chosen_labels(labels, '5-shot', seed=seed) for seed in (0, 1))
  assert set(first) != set(second)
  np.testing.assert_array_equal(first, finetune.chosen_labels(labels, '5-shot', seed=0))


def test_labels_that_cannot_be_had_are_refused():
  with pytest.raises(ValueError, match='class 1 has 3 training images; use a share, such as 10%'):
    finetune.chosen_labels(np.repeat([0, 1], [9, 3]), '5-shot', seed=0)
  with pytest.raises(ValueError, match=r"labels: '20%', expected one of all, 10%, 1%, 5-shot"):
    finetune.chosen_labels(np.arange(4), '20%', seed=0)


def test_class_weights_make_classes_equal():
  labels = np.repeat([0, 1, 3], [60, 30, 10])
  weights = finetune.class_weights(labels, 4)
  assert weights[2] == 0
  np.testing.assert_allclose((weights * np.bincount(labels, minlength=4))[[0, 1, 3]], 100 / 3, rtol=1e-6)
  assert weights[labels].mean() == pytest.approx(1)


def test_dystress_s_schedule():
  rates = finetune.FULL.learning_rate * finetune.FULL.rates()
  np.testing.assert_allclose(rates[[0, 29, 30, 39, 40, 49]], [0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_fine_tuning_learns_easy_classes_and_moves_the_encoder(prepared):
  parts, state = prepared
  found = finetune.finetune(parts(1), state, protocol=SHORT, seeds=(0, 1))
  assert found['top1'] > 60, 'chance is 25'
  assert found['top1'] == pytest.approx(np.mean(found['top1_seeds']))
  assert found['top1_std'] == pytest.approx(np.std(found['top1_seeds'], ddof=1))
  params, stats = fit(prepared, 1, SHORT, frozen=False)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params['encoder'], state.params['network']['encoder'])
  assert all(jax.tree.leaves(moved))
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), stats, state.batch_stats['encoder'])))


@pytest.mark.parametrize('frozen', [False, True])
def test_the_same_classifier_on_any_devices(prepared, frozen):
  protocol = dataclasses.replace(SHORT, epochs=1)
  one, two = (fit(prepared, devices, protocol, frozen=frozen) for devices in (1, 2))
  chex.assert_trees_all_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('frozen', [False, True])
def test_the_same_classifier_from_images_on_the_device_and_from_the_host(prepared, frozen, monkeypatch):
  protocol = dataclasses.replace(SHORT, epochs=2)
  one_by_one = fit(prepared, 1, protocol, frozen=frozen)
  with monkeypatch.context() as patched:
    patched.setattr(features, 'ready', lambda source, size: False)
    from_host = fit(prepared, 1, protocol, frozen=frozen)
  parts, _ = prepared
  monkeypatch.setitem(parts(1).config.parallel, 'steps_per_call', 3)  # an epoch has 4
  scanned = fit(prepared, 1, protocol, frozen=frozen)
  chex.assert_trees_all_close(one_by_one, from_host, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(one_by_one, scanned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['cacr_large', 'cacr_small', 'imagenet_lars'])
def test_a_frozen_encoder_stays_as_it_was(prepared, name):
  _, state = prepared
  protocol = dataclasses.replace(linear.PROTOCOLS[name], epochs=1, batch=32)
  params, stats = fit(prepared, 1, protocol, frozen=True)
  chex.assert_trees_all_equal(params['encoder'], state.params['network']['encoder'])
  chex.assert_trees_all_equal(stats, state.batch_stats['encoder'])
  assert np.any(params['head']['kernel'] != linear.initial_kernels([0], *params['head']['kernel'].shape)[0])


def test_without_augmentation_a_frozen_step_is_the_papers_formula(prepared, monkeypatch):
  """One full batch: W − rate · Xᵀ(softmax(XW) − Y)/n, X centred and scaled, in float64."""
  parts, state = prepared
  chosen = parts(1)
  monkeypatch.setattr(
    finetune, '_crops_and_flips', lambda config: (lambda key, image: chosen.normalize(image), chosen.normalize)
  )
  protocol = linear.Protocol('', 'sgd', 2.0, 64, 1, (5,), 0.1)
  params, _ = fit(prepared, 1, protocol, frozen=True)
  images = jax.vmap(chosen.normalize)(chosen.train.items)
  x = np.float64(jax.jit(chosen.method.features)(state.params, state.batch_stats, images)['backbone'])
  x = x - x.mean(axis=0)
  x /= np.sqrt(np.square(x).sum(axis=1).mean())
  kernel = np.float64(linear.initial_kernels([0], x.shape[1], 4)[0])
  odds = np.exp(x @ kernel)
  error = odds / odds.sum(axis=1, keepdims=True) - np.eye(4)[chosen.train.labels]
  np.testing.assert_allclose(params['head']['kernel'], kernel - 2.0 * x.T @ error / 64, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(params['head']['bias'], -2.0 * error.mean(axis=0), rtol=1e-3, atol=1e-5)


def test_evaluations_fine_tune_by_config(prepared, monkeypatch):
  parts, state = prepared
  chosen = parts(1)
  asked = []
  report = {'top1': 50.0, 'top1_std': None}

  def record(run, state, *, labels='all', protocol=finetune.FULL, frozen=False, seeds):
    asked.append((labels, protocol, frozen, tuple(seeds)))
    return {**report, 'frozen': frozen, 'labels': labels}

  monkeypatch.setattr(finetune, 'finetune', record)
  for choice in ('5-shot', 'linear'):
    monkeypatch.setitem(chosen.config.eval, 'finetune', choice)
    assert evaluate._finetune(chosen, state)['finetune'] == 50.0
  assert asked == [
    ('5-shot', finetune.FULL, False, (0,)),
    ('all', linear.PROTOCOLS['supervised_cifar'], True, (0,)),
  ]
