"""Each method learns: three epochs of a part of the embedded set, with a tiny encoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from ssl_jax import config, methods, optim
from ssl_jax.data import augment, embedded
from ssl_jax.evals import knn
from ssl_jax.state import State
from ssl_jax.step import example_keys, make_update, make_views

IMAGES, BATCH, EPOCHS, SIZE, CROP = 1500, 25, 3, 16, 8
STEPS = EPOCHS * IMAGES // BATCH
LENGTHS = dict(steps_per_epoch=STEPS // EPOCHS, total_steps=STEPS)
SEED = 0
NONE = dict(name='none')
TENTH = dict(name='constant', tau=0.1)
SMALL = dict(features=(32, 16))

METHODS = {
  'simclr': {},
  'dcl_dystress': {
    'loss': dict(name='decoupled'),
    'temperature': dict(name='cosine', tau_min=0.1, tau_max=0.2),
  },
  'dclw_kukleva': {
    'loss': dict(name='decoupled_weighted'),
    'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0),
  },
  'macl': {'loss': dict(name='macl'), 'temperature': NONE},
  'cmc': {'views': 3, 'loss': dict(name='multi_positive')},
  'cacr': {
    'views': 3,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr'),
    'temperature': NONE,
  },
  'moco': {'method': dict(name='moco', queue=500, momentum=0.9)},
  'cacr_moco': {
    'views': 3,
    'method': dict(name='moco', queue=500, momentum=0.9, symmetric=True, intra_batch=True),
    'loss': dict(name='cacr', stop_positive_weights=True),
    'temperature': NONE,
  },
  'moco_v3': {'method': dict(name='moco_v3', momentum=0.9, predictor=SMALL)},
  'memory_bank': {'method': dict(name='memory_bank', negatives=500)},
  'byol': {'method': dict(name='byol', momentum=0.9, predictor=SMALL), 'loss': dict(name='byol'), 'temperature': NONE},
  'simsiam': {
    'method': dict(name='simsiam', predictor=dict(features=(8, 16))),
    'loss': dict(name='simsiam'),
    'temperature': NONE,
  },
  **{
    name: {'method': dict(name='redundancy'), 'loss': dict(name=name), 'temperature': NONE}
    for name in ('barlow_twins', 'vicreg', 'w_mse', 'zero_cl', 'arb')
  },
  'dino': {
    'method': dict(name='dino', momentum=0.9),
    'loss': dict(name='dino'),
    'projector': dict(name='dino', features=(32, 16), prototypes=64),
    'temperature': TENTH,
  },
  'swav_multi_crop': {
    'method': dict(name='swav', predictor=dict(number=32), queue=200, queue_epochs=1),
    'loss': dict(name='swav'),
    'projector': dict(name='swav', features=(32, 16)),
    'temperature': TENTH,
    'small_crops': dict(number=2, size=CROP, scale=(0.1, 0.4)),
  },
}


def chosen(changes):
  made = base.get_config()
  settings = {
    'model': dict(name='resnet_tiny', width=12, stage_sizes=(1, 1), stem_stride=1),
    'projector': dict(name='simclr', **SMALL),
    'data.image_size': SIZE,
    'dtype': 'float32',
    'batch_size': BATCH,
    'optimizer': dict(name='adamw', learning_rate=3e-3, weight_decay=1e-4),
  }
  for key, value in (settings | changes).items():
    config.override(made, key, value)
  config.validate(made, base.get_config())
  return made


@functools.cache
def images():
  """(training images, labels, test images, labels), at half their size."""
  half = lambda x: x.reshape(-1, SIZE, 2, SIZE, 2, 3).mean(axis=(2, 4)).astype(np.uint8)
  (train, train_labels), (test, test_labels) = (
    embedded.generate('train', size=IMAGES),
    embedded.generate('test'),
  )
  return half(train), train_labels, half(test), test_labels


@functools.cache
def batches():
  """The (views, index) of each step, the same for all methods: three views of SIZE, then two small crops."""
  settings = augment.PRESETS['dystress_cifar'] | dict(jitter=0.0, size=SIZE, crop_scale=(0.4, 1.0))
  small = settings | dict(size=CROP, crop_scale=(0.1, 0.4))
  augments = [augment.make(settings)] * 3 + [augment.make(small)] * 2
  view = jax.jit(lambda step, x: make_views(augments, example_keys(0, step, jnp.arange(BATCH)), x))
  order = np.concatenate([np.random.default_rng(epoch).permutation(IMAGES) for epoch in range(EPOCHS)])
  index = order.reshape(STEPS, BATCH).astype(np.int32)
  return [(view(jnp.int32(step), images()[0][index[step]]), index[step]) for step in range(STEPS)]


@functools.cache
def encode(encoder):
  normalize = augment.make_eval(SIZE, **augment.MEAN_STD['cifar10'])
  return jax.jit(lambda variables, x: encoder.apply(variables, jax.vmap(normalize)(x), train=False))


def judged(method, state):
  """(kNN accuracy, the standard deviation of the unit features times sqrt(d)), of the test images."""
  params, batch_stats = state.evaluated
  variables = {'params': params['network']['encoder'], 'batch_stats': batch_stats['encoder']}
  train, train_labels, test, labels = images()
  apply = lambda x: np.concatenate(
    [encode(method.network.encoder)(variables, part) for part in np.split(x, len(x) // 250)]
  )
  bank, queries = apply(train), apply(test)
  unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
  spread = unit.std(axis=0).mean() * unit.shape[1] ** 0.5
  return knn.accuracy(bank, train_labels, queries, labels, k=(10,), topk=(1,))['knn10'], spread


def adamw(settings, rate):
  made = optim.create(settings, rate)

  def update(*arguments):
    with jax.numpy_dtype_promotion('standard'):  # optax's bias correction raises a float to an integer array
      return made.update(*arguments)

  return optax.GradientTransformation(made.init, update)


@pytest.mark.parametrize('name', METHODS)
def test_every_method_learns(name):
  made = chosen(METHODS[name])
  method = methods.create(made, examples=IMAGES, **LENGTHS)
  params, batch_stats, extra = method.init(jax.random.key(SEED), jnp.zeros((2, SIZE, SIZE, 3)))
  rate = optim.rate(made.optimizer, batch_size=BATCH, **LENGTHS)
  optimizer = adamw(made.optimizer, rate)
  state = State(jnp.zeros((), jnp.int32), params, batch_stats, extra, optimizer.init(params))
  state = jax.tree.map(
    jnp.array, state
  )  # the momentum encoder starts as the same arrays, which cannot be donated twice
  before, _ = judged(method, state)

  kept = [*range(made.views), *range(3, 3 + made.small_crops.number)]
  given = [lambda key, view: view] * len(kept)  # the views are made already
  update = jax.jit(make_update(method, optimizer, rate, given, seed=0), donate_argnums=0)
  losses = []
  for views, index in batches():
    state, metrics = update(state, tuple(views[v] for v in kept), index)
    losses.append(metrics['loss'])

  assert np.isfinite(losses).all()
  after, spread = judged(method, state)
  print(name, before, after, spread)
  assert spread > 0.3, 'the features collapse'
  assert after > before, 'no better than the random encoder'
