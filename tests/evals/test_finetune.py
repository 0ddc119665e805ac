"""Training on labels: which labels, which weights, what is trained, and the same result on any devices."""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from ssl_jax.data import augment, pipeline, sources
from ssl_jax.evals import features, finetune, linear
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.run import builder
from tests.helpers import tiny

pytestmark = pytest.mark.slow  # it trains classifiers and encoders

SHORT = dataclasses.replace(finetune.FULL, epochs=4, milestones=(3,), learning_rate=0.05, batch=16)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """(devices -> run, the state of an untrained encoder)"""
  folder = tmp_path_factory.mktemp('data')
  parts = functools.cache(lambda devices: builder.build(tiny(folder, **{'parallel.devices': devices})))
  return parts, parts(1).initial_state()


@pytest.fixture
def unaugmented(prepared, monkeypatch):
  """(the run on one device, its state), trained without augmentation"""
  parts, state = prepared
  chosen = parts(1)
  plain = lambda key, image: chosen.views.eval_view(image)
  monkeypatch.setattr(finetune, '_crops_and_flips', lambda config, on_device: plain)
  return chosen, state


def extracted(chosen, state, source):
  """Backbone features [n, d]"""
  images = jax.vmap(chosen.views.eval_view)(source.items)
  return np.asarray(jax.jit(chosen.method.features)(state.params, state.batch_stats, images)['backbone'])


def fit(prepared, devices, protocol, *, frozen, images=slice(None)):
  parts, state = prepared
  chosen = parts(devices)
  source = chosen.train.subset(np.arange(len(chosen.train))[images])
  _, fitted = finetune._fit(chosen, state, source, source.labels, 4, protocol, frozen, 0)
  return chosen.devices.unreplicate((fitted['params'], fitted['stats']))


def test_shares_are_per_class_and_shots_are_exact():
  labels, sizes = np.repeat([0, 1, 2, 3], [200, 40, 5, 18]), [200, 40, 5, 18]
  counts = {'all': sizes, '10%': [20, 4, 1, 2], '1%': [2, 1, 1, 1], '5-shot': [5, 5, 5, 5]}
  for which, expected in counts.items():
    chosen = finetune.chosen_labels(labels, which, seed=0)
    assert np.bincount(labels[chosen]).tolist() == expected
    assert len(set(chosen)) == len(chosen)
  first, second = (finetune.chosen_labels(labels, '5-shot', seed=seed) for seed in (0, 1))
  assert set(first) != set(second)
  np.testing.assert_array_equal(first, finetune.chosen_labels(labels, '5-shot', seed=0))


def test_impossible_choices_of_labels_are_refused():
  with pytest.raises(ValueError, match=r"^labels = '5-shot' is more than the 3 training images of class 1"):
    finetune.chosen_labels(np.repeat([0, 1], [9, 3]), '5-shot', seed=0)
  with pytest.raises(ValueError, match=r"labels = '20%' is not a valid choice: did you mean '10%'"):
    finetune.chosen_labels(np.arange(4), '20%', seed=0)


def test_the_schedule_is_that_of_dystress():
  rates = finetune.FULL.learning_rate * finetune.FULL.factors()
  np.testing.assert_allclose(rates[[0, 29, 30, 39, 40, 49]], [0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
  assert (finetune.FULL.optimizer, finetune.FULL.batch, len(rates)) == ('sgd', 128, 50)


def test_the_batch_is_divisible_by_the_devices_and_sets_the_rate_of_sgd():
  adam = dataclasses.replace(finetune.FULL, optimizer='adam')
  assert finetune._batch(finetune.FULL, 1000, 4) == (128, 1)
  assert finetune._batch(finetune.FULL, 51, 4) == (48, 48 / 128)
  assert finetune._batch(adam, 51, 4) == (48, 1)
  with pytest.raises(ValueError, match=r'^labels: only 3 images for 4 devices; use fewer devices or more labels'):
    finetune._batch(finetune.FULL, 3, 4)


def test_there_is_one_class_weight_for_each_class():
  for weights in ((), (1.0, 2.0, 3.0)):
    finetune.require_weights(weights, 3)
  for weights in ((1.0,), (1.0, 2.0), (1.0,) * 4):
    with pytest.raises(ValueError, match=r'^eval\.class_weights = .* must be one number for each of the 3 classes'):
      finetune.require_weights(weights, 3)


def test_fine_tuning_learns_easy_classes_and_moves_the_encoder(prepared):
  parts, state = prepared
  found = finetune.finetune(parts(1), state, protocol=SHORT, seeds=(0, 1))
  assert found['top1'] > 60, 'chance is 25'
  assert found['top1'] == pytest.approx(np.mean(found['top1_seeds']))
  assert found['top1_std'] == pytest.approx(np.std(found['top1_seeds'], ddof=1))
  assert found['scale'] == 'none', 'only the features of a frozen encoder are scaled'
  params, stats = fit(prepared, 1, SHORT, frozen=False)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params['encoder'], state.params['network']['encoder'])
  assert all(jax.tree.leaves(moved))
  assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), stats, state.batch_stats['encoder'])))


def test_the_host_crops_the_stored_images(tmp_path, monkeypatch):
  chosen = tiny(tmp_path, **{'data.image_size': 8, 'data.on_device': 'no', 'augment.crop_scale': (0.4, 0.9)})
  prepared, calls = builder.build(chosen), []
  batches = pipeline.batches
  monkeypatch.setattr(pipeline, 'batches', lambda source, **kw: calls.append((source, kw)) or batches(source, **kw))
  assert finetune.finetune(prepared, prepared.initial_state(), protocol=SHORT)['top1'] > 60
  ((source, settings),) = calls
  assert source.items.shape == (64, 12, 12, 3)
  (crop,) = settings['crops']
  assert (crop.size, crop.scale) == (8, (0.4, 0.9))


def test_images_cropped_by_the_host_are_not_cropped_again(tmp_path, monkeypatch):
  changes = {'data.image_size': 8, 'data.on_device': 'no', 'augment.crop_scale': (0.2, 0.3), 'augment.flip': 0.0}
  chosen = builder.build(tiny(tmp_path, **changes))
  seen, image = [], np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
  update = lambda model, direction, augment, *rest: seen.append(augment) or (lambda *state: state)
  monkeypatch.setattr(finetune._Classifier, 'update', update)
  monkeypatch.setattr(finetune, '_host_epochs', lambda *given: contextlib.nullcontext(lambda state, epoch: state))
  fit(((lambda devices: chosen), chosen.initial_state()), 1, SHORT, frozen=False)
  np.testing.assert_allclose(seen[0](jax.random.key(0), image), chosen.views.eval_view(image), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('on_device', ['yes', 'no'])
def test_a_protocol_may_have_its_own_crops(tmp_path, monkeypatch, on_device):
  """Those of pretraining are larger than those of the linear classifiers of MoCo's code."""
  chosen = builder.build(tiny(tmp_path, **{'data.on_device': on_device, 'augment.crop_scale': (0.2, 1.0)}))
  seen, views, batches = [], finetune.image_views, finetune.host_batches
  note = lambda config: seen.append(tuple(config.augment.crop_scale))
  monkeypatch.setattr(finetune, 'image_views', lambda config, on_device: note(config) or views(config, on_device))
  monkeypatch.setattr(
    finetune, 'host_batches', lambda config, *rest, **kw: note(config) or batches(config, *rest, **kw)
  )
  for crops, expected in ((None, (0.2, 1.0)), ((0.08, 1.0), (0.08, 1.0))):
    seen.clear()
    protocol = dataclasses.replace(SHORT, epochs=1, crop_scale=crops)
    found = finetune.finetune(chosen, chosen.initial_state(), protocol=protocol, frozen=True)
    assert tuple(found['crop_scale']) == expected
    assert seen == [expected] * (1 if on_device == 'yes' else 2)


def test_images_of_another_stored_size_are_cropped_on_the_device(tmp_path, monkeypatch):
  chosen = builder.build(tiny(tmp_path, **{'data.image_size': 8, 'data.stored_size': 12}))
  monkeypatch.delattr(finetune, '_host_epochs')
  fit(((lambda devices: chosen), chosen.initial_state()), 1, dataclasses.replace(SHORT, epochs=1), frozen=False)


def test_arrays_stay_off_the_device_if_the_config_says_so(tmp_path, monkeypatch):
  chosen = builder.build(tiny(tmp_path, **{'data.on_device': 'no'}))
  assert chosen.train.ready(12)
  monkeypatch.delattr(finetune, '_device_epochs')
  fit(((lambda devices: chosen), chosen.initial_state()), 1, dataclasses.replace(SHORT, epochs=1), frozen=False)


def test_host_batches_use_the_configured_workers_and_processes(tmp_path, monkeypatch):
  chosen = builder.build(tiny(tmp_path, **{'data.on_device': 'no', 'data.image_size': 8, 'data.workers': 3}))
  used = {}
  monkeypatch.setattr(pipeline, 'batches', lambda source, **settings: used.update(settings) or iter(()))
  monkeypatch.setattr(finetune.contextlib, 'closing', contextlib.nullcontext)
  with finetune._host_epochs(chosen, chosen.train, lambda *state: state, 16, 2, seed=5):
    assert used['num_workers'] == 3 and {'process_index', 'process_count'} <= used.keys()


def test_the_host_crops_whole_views_if_the_run_trains_on_smaller_ones(tmp_path):
  chosen = builder.build(tiny(tmp_path, **{'data.on_device': 'no', 'augment.size': 8}))
  fit(((lambda devices: chosen), chosen.initial_state()), 1, dataclasses.replace(SHORT, epochs=1), frozen=False)


def test_a_frozen_classifier_scales_plain_features_of_readable_images(tmp_path, monkeypatch):
  """Whatever the features of kNN: with `eval.flip`, these are unit vectors."""
  rng = np.random.default_rng(0)
  for split, count in (('train', 8), ('test', 4)):
    for k in range(3 * count):
      file = tmp_path / 'images' / split / f'class{k % 3}' / f'{k:02d}.png'
      file.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(rng.integers(256, size=(12, 12, 3), dtype=np.uint8)).save(file)
  (tmp_path / 'images' / 'train' / 'class0' / '03.png').write_bytes(b'no image')
  data = dict(source='folder', path=str(tmp_path / 'images'), on_device='no', workers=0, broken='skip', image_size=12)
  choices = {'eval.flip': True, 'eval.finetune': 'linear', 'eval.linear': '', 'eval.k': (1,), 'eval.view_images': 4}
  evaluator = ImageEvaluator(builder.build(tiny(tmp_path, data=data, batch_size=8, **choices)))
  moments, scaled = linear.moments, []
  monkeypatch.setattr(linear, 'moments', lambda x, scale: scaled.append(x) or moments(x, scale=scale))
  once = dataclasses.replace(linear.PROTOCOLS['balanced_cifar'], epochs=1)
  monkeypatch.setitem(linear.PROTOCOLS, 'balanced_cifar', once)
  state = evaluator.run.initial_state()
  evaluator.results(state, tmp_path)
  source = evaluator.run.eval_train
  assert len(source.readable()) == 23
  images, _ = features.squares(source, source.readable(), 12)
  plain = jax.jit(evaluator.run.method.features)(*state.evaluated, jax.vmap(evaluator.run.views.eval_view)(images))
  np.testing.assert_allclose(scaled[0], plain['backbone'], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('frozen', [False, True])
def test_the_same_classifier_on_any_devices(prepared, frozen):
  """With class weights, whose sum differs between the devices."""
  protocol = dataclasses.replace(SHORT, epochs=1, class_weights=(1.0, 2.0, 4.0, 8.0))
  one, two = (fit(prepared, devices, protocol, frozen=frozen) for devices in (1, 2))
  chex.assert_trees_all_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('frozen', [False, True])
def test_the_same_classifier_from_images_on_the_device_and_from_the_host(tmp_path, frozen, monkeypatch):
  protocol = dataclasses.replace(SHORT, epochs=2)
  chosen = builder.build(tiny(tmp_path, augment=dict(name='none', flip=0.5)))  # the host draws different crops
  prepared = (lambda devices: chosen), chosen.initial_state()
  one_by_one = fit(prepared, 1, protocol, frozen=frozen)
  with monkeypatch.context() as patched:
    patched.setattr(sources.Arrays, 'ready', lambda source, size: False)
    from_host = fit(prepared, 1, protocol, frozen=frozen)
  chosen.config.parallel.steps_per_call = 3  # an epoch has 4
  scanned = fit(prepared, 1, protocol, frozen=frozen)
  chex.assert_trees_all_close(one_by_one, from_host, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(one_by_one, scanned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['cacr_large', 'cacr_small', 'imagenet_lars'])
def test_a_frozen_encoder_does_not_change(prepared, name):
  _, state = prepared
  protocol = dataclasses.replace(linear.PROTOCOLS[name], epochs=1, batch=32)
  params, stats = fit(prepared, 1, protocol, frozen=True)
  chex.assert_trees_all_equal(params['encoder'], state.params['network']['encoder'])
  chex.assert_trees_all_equal(stats, state.batch_stats['encoder'])
  assert np.any(params['head']['kernel'] != linear.initial_kernels([0], *params['head']['kernel'].shape)[0])


@pytest.mark.parametrize('scale', ['norm', 'none'])
def test_without_augmentation_a_frozen_step_equals_the_formula(prepared, unaugmented, scale):
  """One full batch: W − rate · Xᵀ(softmax(XW) − Y)/n in float64, with X centred and scaled, or unchanged.

  The rate is 2 instead of 4, because there are 64 images for a batch of 128.
  """
  chosen, state = unaugmented
  protocol = linear.Protocol('', 'sgd', 4.0, 128, 1, (5,), 0.1, scale=scale)
  params, _ = fit(prepared, 1, protocol, frozen=True)
  x = np.float64(extracted(chosen, state, chosen.train))
  if scale == 'norm':
    x -= x.mean(axis=0)
    x /= np.sqrt(np.square(x).sum(axis=1).mean())
  kernel = np.float64(linear.initial_kernels([0], x.shape[1], 4)[0])
  odds = np.exp(x @ kernel)
  error = odds / odds.sum(axis=1, keepdims=True) - np.eye(4)[chosen.train.labels]
  np.testing.assert_allclose(params['head']['kernel'], kernel - 2.0 * x.T @ error / 64, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(params['head']['bias'], -2.0 * error.mean(axis=0), rtol=1e-3, atol=1e-5)


def test_with_weights_inverse_to_its_size_each_class_counts_the_same(prepared, unaugmented):
  """Two full batches of unequal classes, the second at a tenth of the learning rate; momentum 0.9 on all weights."""
  chosen, state = unaugmented
  kept = np.flatnonzero(np.arange(64) // 4 < np.array([16, 8, 4, 2])[chosen.train.labels])
  weights = tuple(7 / n for n in (16, 8, 4, 2))  # only their ratios matter
  protocol = finetune.FineTuning('', 'sgd', 0.5, 30, 2, (1,), 0.1, class_weights=weights)
  found, _ = fit(prepared, 1, protocol, frozen=False, images=kept)
  images, labels = jax.vmap(chosen.views.eval_view)(chosen.train.items[kept]), chosen.train.labels[kept]
  assert np.bincount(labels).tolist() == [16, 8, 4, 2]
  encoder = chosen.method.network.encoder.clone(axis_name=None)

  def loss(params, stats):
    variables = {'params': params['encoder'], 'batch_stats': stats}
    x, changed = encoder.apply(variables, images, train=True, mutable=['batch_stats'])
    right = jax.nn.log_softmax(x @ params['head']['kernel'] + params['head']['bias'][None])[np.arange(30), labels]
    return -jnp.mean(jnp.stack([right[labels == c].mean() for c in range(4)])), changed['batch_stats']

  gradient = jax.jit(jax.grad(loss, has_aux=True))
  kernel = linear.initial_kernels([0], 8, 4)[0]
  params = {'encoder': state.params['network']['encoder'], 'head': {'kernel': kernel, 'bias': np.zeros(4, np.float32)}}
  first, stats = gradient(params, state.batch_stats['encoder'])
  params = jax.tree.map(lambda p, g: p - 0.5 * g, params, first)
  second, _ = gradient(params, stats)
  params = jax.tree.map(lambda p, g, before: p - 0.05 * (g + 0.9 * before), params, second, first)
  chex.assert_trees_all_close(found, params, rtol=1e-3, atol=1e-4)


def test_the_seed_sets_the_first_weights_the_order_and_the_augmentation(prepared, monkeypatch):
  parts, state = prepared
  chosen, seen, example_keys = parts(1), [], finetune.example_keys

  def keys(seed, step, positions):
    jax.debug.callback(lambda step, positions: seen.append((int(step), seed, positions.tolist())), step, positions)
    return example_keys(seed, step, positions)

  monkeypatch.setattr(finetune, 'example_keys', keys)
  still = dataclasses.replace(SHORT, epochs=2, batch=32, learning_rate=0.0)
  _, fitted = finetune._fit(chosen, state, chosen.train, chosen.train.labels, 4, still, True, 3)
  kernel = chosen.devices.unreplicate(fitted['params'])['head']['kernel']
  np.testing.assert_array_equal(kernel, linear.initial_kernels([3], 8, 4)[0])
  jax.effects_barrier()
  orders = [pipeline.order(3, epoch, 64).reshape(2, 32)[k].tolist() for epoch in (0, 1) for k in (0, 1)]
  assert sorted(seen) == [(step, 3, order) for step, order in enumerate(orders)]


def test_hits_are_those_of_the_first_and_the_first_five_classes(prepared, monkeypatch):
  """Of eight classes; no training image has the label 5."""
  parts, state = prepared
  logits, labels = np.tile(np.arange(8.0), (8, 1)), np.arange(8)
  classes = []
  fit = lambda run, state, source, labels, classes_, *rest: (
    classes.append(classes_) or (None, dict(params={}, stats={}))
  )
  monkeypatch.setattr(finetune, '_fit', fit)
  monkeypatch.setattr(features, 'extract', lambda *given, **named: ({'logits': logits}, labels))
  train_labels = np.array([0, 1, 2, 3, 4, 6, 7, 7])[np.arange(64) % 8]
  first, five = finetune._one_seed(parts(1), state, train_labels, 'all', SHORT, False, 0)
  assert classes == [8]
  np.testing.assert_array_equal(first, labels == 7)
  np.testing.assert_array_equal(five, labels >= 3)


def test_colors_are_not_augmented(prepared, tmp_path):
  """Only the crop and the flip of the run's augmentation remain."""
  parts, _ = prepared
  names = ('jitter', 'grey', 'blur', 'solarize', 'cutout', 'rotation', 'noise')
  chosen = tiny(tmp_path, augment=dict(name='dystress_cifar', **dict.fromkeys(names, 1.0)))
  changed = finetune._crops_and_flips(finetune._plain(chosen), on_device=True)
  plain = augment.make(dict(size=12, crop=True, flip=0.5, **augment.MEAN_STD['cifar10']))
  keys, images = jax.random.split(jax.random.key(0), 8), parts(1).train.items[:8]
  views = (jax.jit(jax.vmap(view))(keys, images) for view in (changed, plain))
  np.testing.assert_allclose(*views, atol=1e-6)


def test_test_images_are_classified_with_running_statistics(prepared, monkeypatch):
  """The labels are the predictions of a classifier with these statistics, so its accuracy is 100 %."""
  parts, state = prepared
  chosen = parts(1)
  encoder, stats = state.params['network']['encoder'], state.batch_stats['encoder']
  x = extracted(chosen, state, chosen.eval_test)
  kernel = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  head = {'kernel': kernel, 'bias': -x.mean(axis=0) @ kernel}
  monkeypatch.setattr(chosen.eval_test, 'labels', np.argmax(x @ kernel + head['bias'], axis=1))
  model = finetune._Classifier(chosen, False, np.zeros(8, np.float32), np.float32(1))
  fitted = chosen.devices.replicate({'params': {'encoder': encoder, 'head': head}, 'stats': stats})
  monkeypatch.setattr(finetune, '_fit', lambda *args: (model, fitted))
  assert finetune.finetune(chosen, state)['top1'] == 100


def test_each_seed_trains_a_classifier(prepared, monkeypatch):
  parts, state = prepared
  hits = lambda *args: (np.arange(10) < args[-1], np.arange(10) <= args[-1])
  monkeypatch.setattr(finetune, '_one_seed', hits)
  found = finetune.finetune(parts(1), state, seeds=(3, 5))
  assert (found['top1'], found['top1_seeds'], found['top5']) == (40, [30, 50], 50)


def test_evaluations_fine_tune_as_configured(prepared, monkeypatch):
  parts, state = prepared
  chosen = parts(1)
  calls = []
  report = {'top1': 50.0, 'top1_std': None, 'top5': 75.0}

  def record(run, state, *, labels='all', protocol=finetune.FULL, frozen=False, seeds):
    calls.append((labels, protocol, frozen, tuple(seeds)))
    return {**report, 'frozen': frozen, 'labels': labels}

  monkeypatch.setattr(finetune, 'finetune', record)
  monkeypatch.setitem(chosen.config.eval, 'seeds', (2, 3))
  for choice in ('5-shot', 'linear', 'linear 1%'):
    monkeypatch.setitem(chosen.config.eval, 'finetune', choice)
    found = finetune.evaluate(chosen, state)
    assert (found['finetune'], found['finetune_top5']) == (50.0, 75.0)
  assert calls == [
    ('5-shot', finetune.FULL, False, (2, 3)),
    ('all', linear.PROTOCOLS['balanced_cifar'], True, (2, 3)),
    ('1%', linear.PROTOCOLS['balanced_cifar'], True, (2, 3)),
  ]
  for key, value in {'finetune': 'linear', 'linear': 'cacr_large'}.items():
    monkeypatch.setitem(chosen.config.eval, key, value)
  finetune.evaluate(chosen, state)
  assert calls[-1] == ('all', linear.PROTOCOLS['cacr_large'], True, (2, 3))
  for key, value in {'finetune': 'all', 'finetune_learning_rate': 1.0, 'class_weights': (1.0, 2.0, 3.0, 4.0)}.items():
    monkeypatch.setitem(chosen.config.eval, key, value)
  finetune.evaluate(chosen, state)
  wanted = dataclasses.replace(finetune.FULL, learning_rate=1.0, class_weights=(1.0, 2.0, 3.0, 4.0))
  assert calls[-1] == ('all', wanted, False, (2, 3))


def test_class_weights_are_1_unless_given(prepared):
  images = slice(0, 22)  # classes of 6, 6, 5 and 5 images
  once = dataclasses.replace(SHORT, epochs=1, milestones=())
  given = [
    fit(prepared, 1, dataclasses.replace(once, class_weights=w), frozen=False, images=images) for w in ((), (1.0,) * 4)
  ]
  chex.assert_trees_all_equal(*given)
  other = fit(prepared, 1, dataclasses.replace(once, class_weights=(1.0, 9.0, 1.0, 1.0)), frozen=False, images=images)
  difference = np.abs(other[0]['head']['bias'] - given[0][0]['head']['bias'])
  assert difference.max() > 1e-3


def test_calls_wait_for_earlier_calls():
  waited = []

  class Loss:
    def __init__(self, call):
      self.call = call

    def block_until_ready(self):
      waited.append(self.call)

  run_one = finetune._in_turn(lambda call: (f'state {call}', Loss(call)), ahead=2)
  seen = []
  for call in range(5):
    assert run_one(call) == f'state {call}'
    seen.append(list(waited))
  assert seen == [[], [], [0], [0, 1], [0, 1, 2]]


def test_a_classifier_that_diverges_has_no_accuracy(prepared):
  parts, state = prepared
  wild = dataclasses.replace(SHORT, epochs=1, milestones=(), learning_rate=float('inf'))
  cause = 'contain NaN or infinity: its training diverged at learning rate inf'
  message = rf'^logits of eval\.finetune {cause}, so lower eval\.finetune_learning_rate'
  with pytest.raises(ValueError, match=message):
    finetune.finetune(parts(1), state, protocol=wild)
