"""Linear classifiers: training against a float64 loop, others against scikit-learn, every protocol on the digits."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from sklearn import datasets
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from ssl_jax.evals import linear


@functools.cache
def digits(split):
  x, y = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(split).permutation(len(x))
  x, y = x[order].astype(np.float32), y[order]
  return x[:1200], y[:1200], x[1200:], y[1200:]


@functools.cache
def scikit_learn_digits(split):
  train_x, train_y, test_x, test_y = digits(split)
  return 100 * LogisticRegression(max_iter=3000).fit(train_x, train_y).score(test_x, test_y)


def scaled(train_x, test_x):
  return linear._prepare(jnp.asarray(train_x), jnp.asarray(test_x), scale='coordinate')


def small(n=37, d=5, classes=3):
  rng = np.random.default_rng(0)
  y = rng.integers(classes, size=n)
  return (rng.normal(size=(classes, d))[y] + rng.normal(size=(n, d))).astype(np.float32), y


def train_loop(x, y, seed, rate, protocol, batch, classes):
  """One classifier, one step at a time, with the optimizers written out, in float64."""
  n, d = x.shape
  x = x.astype(np.float64)
  key = jax.random.key(seed)
  weights = {
    'kernel': linear.initial_kernels([seed], d, classes)[0].astype(np.float64),
    'bias': np.zeros(classes),
  }
  first = {name: np.zeros_like(w) for name, w in weights.items()}
  second = {name: np.zeros_like(w) for name, w in weights.items()}
  t = 0
  for epoch in range(protocol.epochs):
    if protocol.milestones is None:
      now = rate * 0.5 * (1 + np.cos(np.pi * epoch / protocol.epochs))
    else:
      now = rate * protocol.factor ** sum(epoch >= milestone for milestone in protocol.milestones)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), n))
    for start in range(0, n // batch * batch, batch):
      t += 1
      rows = order[start : start + batch]
      logits = x[rows] @ weights['kernel'] + weights['bias']
      p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
      error = (p - np.eye(classes)[y[rows]]) / batch
      for name, g in {'kernel': x[rows].T @ error, 'bias': error.sum(axis=0)}.items():
        if protocol.optimizer == 'adam':
          first[name] = 0.5 * first[name] + 0.5 * g
          second[name] = 0.999 * second[name] + 0.001 * g**2
          step = first[name] / (1 - 0.5**t) / (np.sqrt(second[name] / (1 - 0.999**t)) + 1e-8)
        else:
          if protocol.optimizer == 'lars' and name == 'kernel':
            g = g * 0.001 * np.linalg.norm(weights[name]) / np.linalg.norm(g)
          first[name] = step = 0.9 * first[name] + g
        weights[name] = weights[name] - now * step
  return weights


class TrainingTest(chex.TestCase):
  @parameterized.parameters(('behaviour', 0.5), ('cacr_small', 0.01), ('balanced_cifar', 0.5), ('imagenet_lars', 3.0))
  def test_training_equals_the_loop_for_every_seed_and_learning_rate(self, name, rate):
    x, y = small()
    protocol = dataclasses.replace(linear.PROTOCOLS[name], epochs=6)
    if protocol.milestones:
      protocol = dataclasses.replace(protocol, milestones=(2, 4))
    seeds, rates = (0, 3), (rate, rate / 4)
    params = linear._train(
      jnp.asarray(x),
      jnp.asarray(y, jnp.int32),
      jnp.asarray(seeds, jnp.uint32),
      jnp.asarray(linear.initial_kernels(seeds, 5, 3)),
      jnp.asarray(rates, jnp.float32),
      protocol=protocol,
      batch=8,
    )
    for i, seed in enumerate(seeds):
      for j, rate in enumerate(rates):
        expected = train_loop(x, y, seed, rate, protocol, 8, 3)
        for part in ('kernel', 'bias'):
          np.testing.assert_allclose(params[part][i, j], expected[part], rtol=2e-3, atol=2e-4)

  @parameterized.parameters(
    ('behaviour', {0: 1, 39: 1, 40: 0.2, 60: 0.04, 80: 0.008, 99: 0.008}),
    ('cacr_small', {0: 1, 59: 1, 60: 0.2, 79: 0.2, 80: 0.04}),
    ('cacr_small_as_is', {0: 1, 59: 1, 60: 0.2, 79: 0.2, 80: 0.04}),
    ('cacr_large', {59: 1, 60: 0.1, 79: 0.1, 80: 0.01}),
    ('balanced_cifar', {0: 1, 45: 0.5}),
    ('dystress_imagenet', {0: 1, 45: 0.5}),
    ('imagenet_lars', {0: 1, 45: 0.5}),
  )
  def test_schedules_are_those_of_the_papers(self, name, expected):
    factors = linear.PROTOCOLS[name].factors()
    for epoch, factor in expected.items():
      self.assertAlmostEqual(factors[epoch], factor)

  # As in the cited papers and code: optimizer, learning rate, batch size, epochs. Wang & Liu print no batch size. The
  # scale of the features is our choice.
  @parameterized.parameters(
    ('behaviour', 'sgd', 30.0, 256, 100, 'norm'),
    ('cacr_small', 'adam', 0.001, 128, 100, 'coordinate'),
    ('cacr_small_as_is', 'adam', 0.001, 128, 100, 'none'),
    ('cacr_large', 'sgd', 30.0, 256, 100, 'norm'),
    ('balanced_cifar', 'sgd', 30.0, 256, 90, 'norm'),
    ('dystress_imagenet', 'sgd', 0.1, 256, 90, 'none'),
    ('imagenet_lars', 'lars', 1.6, 4096, 90, 'coordinate'),
  )
  def test_settings_are_those_of_the_papers(self, name, *expected):
    p = linear.PROTOCOLS[name]
    self.assertEqual((p.optimizer, p.learning_rate, p.batch, p.epochs, p.scale), expected)
    crops = (0.08, 1.0) if name in ('cacr_large', 'dystress_imagenet', 'imagenet_lars') else None
    self.assertEqual(p.crop_scale, crops)

  def test_adam_has_the_constants_of_the_paper(self):
    optimizer = linear.PROTOCOLS['cacr_small'].direction()
    state = optimizer.init(jnp.zeros(2))
    m, v = np.zeros((2, 2))
    gradients = np.array([[1e-8, 0.5], [-2e-8, 0.1], [3e-8, -1.0]])  # eps matters for the first coordinate
    for t, g in enumerate(gradients, start=1):
      m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g**2
      expected = m / (1 - 0.5**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
      step, state = optimizer.update(jnp.asarray(g, jnp.float32), state)
      np.testing.assert_allclose(step, expected, rtol=1e-4)

  def test_the_batch_size_is_the_paper_s_except_on_small_sets(self):
    sgd, lars = linear.PROTOCOLS['cacr_large'], linear.PROTOCOLS['imagenet_lars']
    self.assertEqual(linear._batch(sgd, 50_000), (256, 1.0))
    self.assertEqual(linear._batch(sgd, 900), (32, 0.125))
    self.assertEqual(linear._batch(lars, 1_281_167), (4096, 1.0))
    self.assertEqual(linear._batch(lars, 115_846), (4096, 1.0), 'ImageNet-LT')
    self.assertEqual(linear._batch(lars, 900), (32, 1.0))
    self.assertEqual(linear._batch(sgd, 3), (1, 1 / 256))

  def test_features_are_scaled_by_one_number_after_a_shift(self):
    x = np.random.default_rng(0).normal(3, 5, size=(50, 4)).astype(np.float32)
    train, test = scaled(x, x[:7])
    np.testing.assert_allclose(np.mean(np.square(train)), 1, rtol=1e-5)
    np.testing.assert_allclose(train, (x - x.mean(0)) / np.sqrt(np.mean((x - x.mean(0)) ** 2)), atol=1e-5)
    np.testing.assert_allclose(test, train[:7], atol=1e-6)
    unit, _ = linear._prepare(jnp.asarray(x), jnp.asarray(x), scale='norm')
    np.testing.assert_allclose(np.mean(np.sum(np.square(unit), axis=1)), 1, rtol=1e-5)
    for given, kept in zip((x, x[:7]), linear._prepare(x, x[:7], scale='none'), strict=True):
      np.testing.assert_array_equal(kept, given)
    for scale in ('norm', 'coordinate'):  # of a collapsed encoder
      np.testing.assert_array_equal(linear._prepare(jnp.ones((4, 3)), jnp.ones((2, 3)), scale=scale)[1], 0)


class DigitsTest(chex.TestCase):
  @pytest.mark.slow
  def test_a_protocol_reaches_scikit_learn(self):
    self.compare('cacr_small')

  @parameterized.parameters(*linear.PROTOCOLS)
  @pytest.mark.slow
  def test_every_protocol_reaches_scikit_learn(self, name):
    self.compare(name)

  def compare(self, name):
    ours, theirs = [], []
    for split in (0, 1):
      report = linear.fit(*digits(split), name, seeds=(0, 1)).report
      ours.append(report['top1'])
      theirs.append(scikit_learn_digits(split))
    self.assertGreater(np.mean(ours), np.mean(theirs) - 0.5)
    self.assertEqual(report['protocol'], name)
    self.assertEqual(report['epochs'], linear.PROTOCOLS[name].epochs)
    json.dumps(report)

  def test_logistic_equals_scikit_learn(self):
    train_x, train_y, test_x, test_y = digits(0)
    result = linear.logistic(train_x, train_y, test_x, test_y)
    train, test = (np.asarray(x) for x in scaled(train_x, test_x))
    model = LogisticRegression(C=1.0, max_iter=5000, tol=1e-6).fit(train, train_y)
    np.testing.assert_array_equal(result.predictions[0], model.predict(test))
    self.assertAlmostEqual(result.report['top1'], 100 * model.score(test, test_y), places=4)
    self.assertTrue(result.report['converged'])
    params, _ = linear.fit_logistic(jnp.asarray(train), jax.nn.one_hot(train_y, 10), 1 / 1200, 300)
    np.testing.assert_allclose(params['kernel'], model.coef_.T, atol=2e-2)
    top5 = np.argsort(-model.predict_proba(test), axis=1)[:, :5]
    self.assertAlmostEqual(result.report['top5'], 100 * (top5 == test_y[:, None]).any(axis=1).mean(), places=4)

  def test_logistic_of_features_with_an_offset_and_unequal_scales(self):
    """Some axes vary 100 times as much as others, and all features are far from 0."""
    train_x, train_y, _, _ = digits(0)
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(train_x.shape[1],) * 2))[0]
    x = (5 + train_x @ (np.geomspace(0.01, 1, len(rotation))[:, None] * rotation)).astype(np.float32)
    params, steps = linear.fit_logistic(jnp.asarray(x), jax.nn.one_hot(train_y, 10), 1 / len(x), 500)
    model = LogisticRegression(C=1.0, solver='newton-cholesky').fit(x.astype(np.float64), train_y)
    np.testing.assert_allclose(params['kernel'], model.coef_.T, atol=2e-2)
    self.assertLess(int(steps), 500)

  def test_logistic_of_constant_features(self):
    params, _ = linear.fit_logistic(jnp.ones((4, 3)), jax.nn.one_hot(jnp.array([0, 0, 0, 1]), 2), 0.0, 100)
    chex.assert_tree_all_finite(params)

  def test_logistic_reports_that_it_did_not_converge(self):
    report = linear.logistic(*digits(0), penalty=0.0, steps=5).report
    self.assertEqual((report['steps'], report['converged']), (5, False))

  def test_ridge_equals_scikit_learn(self):
    train_x, train_y, test_x, test_y = digits(1)
    result = linear.ridge(train_x, train_y, test_x, test_y, penalty=0.01)
    train, test = (np.asarray(x, np.float64) for x in scaled(train_x, test_x))
    model = RidgeClassifier(0.01 * len(train)).fit(train, train_y)
    np.testing.assert_array_equal(result.predictions[0], model.predict(test))
    self.assertAlmostEqual(result.report['top1'], 100 * model.score(test, test_y), places=4)

  @pytest.mark.slow
  def test_the_learning_rate_is_chosen_on_held_out_training_examples(self):
    train_x, train_y, test_x, test_y = digits(2)
    rates = (1e-9, 30.0)
    result = linear.fit(train_x, train_y, test_x, test_y, 'balanced_cifar', learning_rates=rates)
    self.assertEqual(result.report['learning_rate'], 30.0)
    self.assertEqual(tuple(result.report['held_out_top1']), rates)
    self.assertGreater(result.report['held_out_top1'][30.0], 90)
    # The test set has no influence, and the best rate is used on the whole training set, as if it were the only one.
    wrong = linear.fit(train_x, train_y, test_x, np.roll(test_y, 1), 'balanced_cifar', learning_rates=rates)
    self.assertEqual(wrong.report['held_out_top1'], result.report['held_out_top1'])
    alone = linear.fit(train_x, train_y, test_x, test_y, 'balanced_cifar', learning_rates=(30.0,))
    np.testing.assert_array_equal(alone.predictions, result.predictions)

  def test_two_calls_agree_and_seeds_differ(self):
    data = digits(0)
    first = linear.fit(*data, 'balanced_cifar', seeds=(0, 1))
    again = linear.fit(*data, 'balanced_cifar', seeds=(0, 1))
    self.assertEqual(first.report, again.report)
    np.testing.assert_array_equal(first.predictions, again.predictions)
    self.assertTrue((first.predictions[0] != first.predictions[1]).any())
    self.assertAlmostEqual(first.report['top1'], np.mean(first.report['top1_seeds']))
    self.assertAlmostEqual(first.report['top1_std'], np.std(first.report['top1_seeds'], ddof=1))
    accuracy = 100 * (first.predictions == data[3][None]).mean(axis=1)
    np.testing.assert_allclose(first.report['top1_seeds'], accuracy, rtol=1e-5)


def test_the_best_rate_on_a_held_out_tenth_is_scaled_with_the_batch(monkeypatch):
  """Labels 0, 2 and 5: the classifier of the second rate is right, that of the first always says 0."""
  x, y = 10 * np.eye(3, dtype=np.float32)[np.arange(300) % 3], np.array([0, 2, 5])[np.arange(300) % 3]
  calls = []

  def train(x, y, seeds, kernels, rates, *, protocol, batch):
    calls.append((len(x), kernels.shape, batch, rates.tolist()))
    right = np.eye(6, dtype=np.float32)[[0, 2, 5]]
    kernel = jnp.stack([right * float(rate == rates.min()) for rate in rates])
    bias = jnp.zeros((len(seeds), len(rates), 6)).at[:, :, 0].set(0.1)
    return {'kernel': jnp.stack([kernel] * len(seeds)), 'bias': bias}

  monkeypatch.setattr(linear, '_train', train)
  found = linear.fit(x, y, x, y, 'balanced_cifar', seeds=(0, 1), learning_rates=(0.5, 0.25))
  (held, shape, batch, rates), (whole, _, last_batch, last) = calls
  assert (held, whole, shape) == (270, 300, (2, 3, 6))
  assert (batch, last_batch) == (9, 10)
  np.testing.assert_allclose(rates, [0.5 * 9 / 256, 0.25 * 9 / 256])
  np.testing.assert_allclose(last, [0.25 * 10 / 256])
  assert found.report['learning_rate'] == 0.25 and found.report['top1'] == 100
  assert found.report['held_out_top1'][0.25] == 100 and found.report['held_out_top1'][0.5] < 60


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(protocol='sgd'), "protocol = 'sgd' is not a valid choice: give one of behaviour, cacr_small"),
    (dict(learning_rates=()), r'learning_rates = \[\] must be at least one positive number'),
    (dict(learning_rates=(0.1, -1)), r'learning_rates = \[0.1, -1.0\] must be'),
    (dict(learning_rates=(0.1, 0)), r'learning_rates = \[0.1, 0.0\] must be'),
    (dict(seeds=()), r'seeds = \(\) must be at least one integer'),
    (dict(train_y=None), 'train_y = None'),
    (dict(train_y=np.zeros(37, int)), 'train_y: every example is of class 0'),
    (dict(test_y=np.full(37, 9)), r'test_y: classes \[9\] do not occur in train_y'),
    (dict(test_x=np.ones((37, 4))), 'test_x: 4 dimensions, but train_x has 5'),
    (dict(train_x=np.full((37, 5), np.nan)), 'train_x: holds NaN'),
    (
      dict(learning_rates=(float('inf'),)),
      'scores of the linear classifier contain NaN or infinity: use another protocol',
    ),
  ],
)
def test_errors_name_the_argument(change, message):
  x, y = small()
  arguments = dict(train_x=x, train_y=y, test_x=x, test_y=y, protocol='behaviour')
  with pytest.raises(ValueError, match=message) as error:
    linear.fit(**(arguments | change))
  assert '\n' not in str(error.value)


def test_penalties_are_checked():
  x, y = small()
  with pytest.raises(ValueError, match='penalty = -1 must be at least 0'):
    linear.logistic(x, y, x, y, penalty=-1)
  with pytest.raises(ValueError, match='penalty = 0 must be positive'):
    linear.ridge(x, y, x, y, penalty=0)
