"""The protocol of ELEVATER: which shots, which hyper-parameters, and training as torch does it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ssl_jax import models
from ssl_jax.evals import few_shot, scoring


def test_each_class_has_its_shots_and_one_of_them_is_held_out():
  labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [50, 8, 3]))
  rows = few_shot.draw(labels, 5, seed=0)
  assert np.bincount(labels[rows]).tolist() == [5, 5, 3] and (np.diff(rows) > 0).all()
  np.testing.assert_array_equal(rows, few_shot.draw(labels, 5, seed=0))
  assert set(rows) != set(few_shot.draw(labels, 5, seed=1))
  out = few_shot.held_out(labels[rows], 0.2)
  assert np.bincount(labels[rows][out]).tolist() == [1, 1, 1]


def test_in_a_set_of_several_labels_every_class_has_enough():
  targets = np.random.default_rng(0).random((200, 6)) < 0.2
  rows = few_shot.draw(targets, 5, seed=0)
  assert (targets[rows].sum(axis=0) >= 5).all() and len(rows) <= 30
  out = few_shot.held_out(targets[rows], 0.2)
  assert (targets[rows][out].sum(axis=0) >= 1).all() and out.mean() < 0.5


def test_the_search_is_that_of_the_toolkit():
  """Seven decays for each of six rates, then two of each step: 6 · (7 + 8) candidates, and a peak is found."""
  protocol, tried = few_shot.Protocol(), []
  assert protocol.grid()[[0, 16, 96]] == pytest.approx([1e-6, 1e-4, 1e6])
  assert protocol.learning_rates == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
  assert (protocol.shots, protocol.held_out, protocol.batch) == (5, 0.2, 32)
  assert (protocol.search_epochs, protocol.epochs) == (10, 50)

  def score(candidates):
    tried.extend(candidates)
    return [100 - abs(np.log10(rate) + 2) - abs(np.log10(decay) + 3.12) for rate, decay in candidates]

  found = few_shot.search(protocol, score)
  assert len(tried) == 6 * (7 + 8)
  assert found.learning_rate == pytest.approx(1e-2)
  assert np.log10(found.weight_decay) == pytest.approx(-3.125)
  assert few_shot.search(protocol, lambda c: [5.0] * len(c))[:2] == pytest.approx((1e-6, 1e-6)), 'the first of equals'
  edge = few_shot.search(protocol, lambda c: [decay for _, decay in c])
  assert edge.weight_decay == pytest.approx(1e6), 'no step leaves the grid'


def test_each_learning_rate_searches_around_its_own_best_decay():
  tried = []

  def score(candidates):
    tried.extend(candidates)
    return [100 - abs(np.log10(decay) - np.log10(rate)) for rate, decay in candidates]

  few_shot.search(few_shot.Protocol(), score)
  for rate in few_shot.Protocol().learning_rates:
    assert min(abs(np.log10(decay / rate)) for r, decay in tried if r == rate) < 1e-6


def test_candidates_train_on_the_other_shots_and_are_scored_on_the_held_out_ones(monkeypatch):
  """A candidate whose logits are not finite scores 0, whatever the metric says."""
  x, labels = np.arange(15, dtype=np.float32)[:, None], np.repeat([0, 1, 2], 5)
  out, calls = few_shot.held_out(labels, 0.2), []

  def train(model, inputs, targets, candidates, **settings):
    calls.append((inputs.ravel().tolist(), targets.tolist(), settings))
    return candidates

  def predictions(model, candidates, inputs, batch):
    assert inputs.ravel().tolist() == x[out].ravel().tolist()
    return [np.full((3, 3), np.nan if rate > 0.01 else rate) for rate, _ in candidates]

  monkeypatch.setattr(few_shot, 'train', train)
  monkeypatch.setattr(few_shot, 'predictions', predictions)
  model, protocol = few_shot.on_features(1, 3, multi_label=False), few_shot.Protocol(then=())
  metric = lambda scores, targets: 50.0 + np.nan_to_num(scores[0, 0], nan=1.0)
  found = few_shot.choose(model, x, labels, metric, protocol, seed=4)
  assert found.learning_rate == pytest.approx(0.01) and found.score == pytest.approx(50.01)
  assert calls == [(x[~out].ravel().tolist(), labels[~out].tolist(), dict(epochs=10, batch=32, seed=4))]


def test_the_head_starts_as_in_torch_and_depends_on_the_seed():
  model = few_shot.on_features(400, 50, multi_label=False)
  first, second = (model.start(seed)['params']['linear']['kernel'] for seed in (0, 1))
  assert np.abs(first - second).max() > 0.01
  expected = torch.nn.Linear(400, 50).weight
  np.testing.assert_allclose(np.abs(first).max(), expected.abs().max().item(), rtol=1e-3)
  np.testing.assert_allclose(first.std(), expected.std().item(), rtol=0.02)


def test_classes_of_one_image_are_refused():
  model, x = few_shot.on_features(5, 3, multi_label=False), np.zeros((3, 5), np.float32)
  with pytest.raises(
    ValueError, match=r'^held_out = 0\.2 leaves no image to train on: give two or more images per class$'
  ):
    few_shot.choose(model, x, np.arange(3), scoring.accuracy, few_shot.Protocol(), seed=0)


@pytest.mark.parametrize('several', [False, True])
@pytest.mark.slow
def test_linear_probing_is_that_of_torch(several):
  """BatchNorm1d without affine, Linear, SGD with Nesterov momentum and weight decay; two candidates at once."""
  rng = np.random.default_rng(0)
  x = (3 + 2 * rng.normal(size=(20, 5))).astype(np.float32)
  targets = rng.random((20, 3)) < 0.4 if several else rng.integers(3, size=20)
  model = few_shot.on_features(5, 3, several)
  candidates, epochs = [(0.1, 1e-2), (0.03, 1e-4)], 3
  (fitted,) = few_shot.train(model, x, targets, candidates, epochs=epochs, batch=7, seed=1)
  scores = few_shot.predictions(model, [fitted], x, batch=8)
  assert len(scores) == 2 and scores[0].shape == (20, 3)
  start = model.start(1)['params']['linear']
  for (rate, decay), found in zip(candidates, scores, strict=True):
    norm, linear = torch.nn.BatchNorm1d(5, affine=False).double(), torch.nn.Linear(5, 3).double()
    linear.load_state_dict({'weight': torch.tensor(start['kernel'].T), 'bias': torch.tensor(start['bias'])})
    sgd = torch.optim.SGD(linear.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)
    loss = torch.nn.BCEWithLogitsLoss() if several else torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
      for rows in few_shot.pipeline.order(1, epoch, 20)[:18].reshape(3, 6):  # three batches of equal size
        sgd.zero_grad()
        loss(
          linear(norm(torch.tensor(np.float64(x[rows])))), torch.tensor(targets[rows] * (1.0 if several else 1))
        ).backward()
        sgd.step()
    norm.eval()
    np.testing.assert_allclose(found, linear(norm(torch.tensor(np.float64(x)))).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fine_tuning_moves_the_encoder_and_linear_probing_is_chosen_well():
  """Classes that a random encoder mixes up; a rate that is too low or a decay that is too high is not chosen."""
  encoder = models.create('resnet_tiny', width=4, stage_sizes=(1,))
  rng = np.random.default_rng(0)
  labels = np.repeat(np.arange(3), 6)
  images = np.clip(rng.normal([[60], [128], [200]], 10, (3, 6)).reshape(18)[:, None, None, None]
                   + rng.normal(0, 5, (18, 8, 8, 3)), 0, 255).astype(np.uint8)  # fmt: skip
  shown = lambda image: jnp.asarray(image, jnp.float32) / 255 - 0.5
  variables = jax.device_get(encoder.init(jax.random.key(0), jnp.zeros((2, 8, 8, 3)), train=False))
  width = encoder.apply(variables, jnp.zeros((2, 8, 8, 3)), train=False).shape[1]
  model = few_shot.on_encoder(encoder, variables, shown, width, 3, multi_label=False)
  protocol = few_shot.Protocol(search_epochs=6, learning_rates=(1e-6, 0.1), decays=(-4.0, 6.0, 3), first=2, then=(1,))
  found = few_shot.choose(model, images, labels, scoring.accuracy, protocol, seed=0)
  assert found.learning_rate == 0.1 and found.weight_decay < 100 and found.score == 100
  candidate = [(found.learning_rate, found.weight_decay)]
  (fitted,) = few_shot.train(model, images, labels, candidate, epochs=6, batch=9, seed=0)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), fitted['params']['encoder'], variables['params'])
  assert all(jax.tree.leaves(moved))
  (scores,) = few_shot.predictions(model, [fitted], images, batch=5)
  assert scoring.accuracy(scores, labels) == 100
