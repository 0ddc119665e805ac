"""Each method learns: two or three epochs of a part of the embedded set, with a tiny encoder."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from ssl_jax import methods
from ssl_jax.data import augment, embedded
from ssl_jax.evals import knn
from ssl_jax.run import optimizers
from ssl_jax.run.state import State
from ssl_jax.run.update import example_keys, make_update
from tests.helpers import changed

pytestmark = pytest.mark.slow  # it trains every method

SEED, IMAGES, BATCH, SIZE, CROP = 0, 2000, 20, 16, 12
STEPS = IMAGES // BATCH  # an epoch
EPOCHS, MOST_EPOCHS = 2, 3

# What changes from view to view is place, size, rotation, brightness and contrast: what stays is the shape.
AUGMENT = dict(augment.OFF, crop=True, flip=0.5, rotation=1.0, rotation_degrees=180.0)
AUGMENT |= dict(jitter=1.0, brightness=0.5, contrast=0.5, saturation=0.0, hue=0.0, **augment.MEAN_STD['cifar10'])
VIEWS, CROPS = 3, 2  # of each image, of which a method takes what it asks for

NONE = dict(name='none')
tau = lambda value: dict(name='constant', tau=value)
PREDICTOR = dict(features=(32, 16))
MOCO = dict(name='moco', queue=8 * BATCH, momentum=0.5)
SMALL_CROPS = dict(number=CROPS, size=CROP, scale=(0.2, 0.5))
REDUNDANCY = {
  'method': dict(name='redundancy'),
  'projector': dict(name='barlow_twins', features=(32, 8)),
  'temperature': NONE,
}
# An image meets a random entry first: one more epoch, two views of it, a rate that is low until the bank is filled,
# and entries that follow at once.
BANK = {
  'epochs': MOST_EPOCHS,
  'views': 2,
  'projector': dict(name='simclr', features=(32,)),
  'optimizer': dict(warmup_epochs=1.5),
}
SWAV = {
  'method': dict(name='swav', predictor=dict(number=32)),
  'loss': dict(name='swav'),
  'temperature': tau(0.3),
}
DINO = {
  'method': dict(name='dino', momentum=0.9, centre_momentum=0.0, teacher_temperature=0.02),
  'projector': dict(name='dino', features=(16,), prototypes=32),
  'loss': dict(name='dino'),
  'temperature': tau(0.1),
  'optimizer': dict(warmup_epochs=0.3),
}

METHODS = {
  'simclr': {},
  'dystress': {'temperature': dict(name='cosine', tau_min=0.07, tau_max=0.2)},
  'kukleva': {'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=EPOCHS)},
  'dcl': {'loss': dict(name='decoupled'), 'temperature': tau(0.1)},
  'dclw': {'loss': dict(name='decoupled_weighted', sigma=0.5), 'temperature': tau(0.1)},
  'macl': {'loss': dict(name='macl', tau0=0.1, alpha=0.5), 'temperature': NONE},
  'align_uniform': {'loss': dict(name='align_uniform', t=2.0), 'temperature': NONE},
  'hard_negative': {'loss': dict(name='hard_negative', beta=1.0), 'temperature': tau(0.5)},
  'isogclr': {'method': dict(name='isogclr'), 'loss': dict(name='robust_contrastive'), 'temperature': NONE},
  'balanced': {'loss': dict(name='balanced', alpha=2.0, lam=4.0), 'temperature': NONE},
  'multi_crop': {'small_crops': SMALL_CROPS},
  'cmc': {'views': 3, 'method': dict(name='cmc')},
  'cacr': {
    'views': 3,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=0.9),
    'temperature': NONE,
  },
  'moco': {'method': MOCO},
  'cacr_moco': {
    'views': 3,
    'method': dict(MOCO, symmetric=True, intra_batch=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0, stop_positive_weights=True),
    'temperature': NONE,
  },
  'moco_v3': {
    'method': dict(name='moco_v3', momentum=0.9, final_momentum=None, predictor=PREDICTOR),
    'temperature': tau(0.5),
  },
  'fnc': {
    'views': 3,
    'method': dict(name='fnc', queue=6 * BATCH, momentum=0.5, top=2, threshold=0.9),
    'loss': dict(name='fnc'),
    'temperature': tau(0.5),
  },
  'memory_bank': {
    **BANK,
    'method': dict(name='memory_bank', momentum=0.0, negatives=500),
    'temperature': tau(0.5),
  },
  'memory_bank_hard': {
    **BANK,
    'method': dict(name='memory_bank', momentum=0.0),
    'loss': dict(name='hard', fraction=0.3),
    'temperature': tau(1.0),
  },
  'byol': {
    'method': dict(name='byol', momentum=0.9, final_momentum=None, predictor=PREDICTOR),
    'projector': dict(name='byol', features=(32, 16)),
    'loss': dict(name='byol'),
    'temperature': NONE,
    'optimizer': dict(learning_rate=1e-2),
  },
  'simsiam': {
    'method': dict(name='simsiam', predictor=dict(features=(8, 16))),
    'projector': dict(name='simsiam', features=(32, 16)),
    'loss': dict(name='simsiam'),
    'temperature': NONE,
    'optimizer': dict(learning_rate=1e-2),
  },
  **{name: {**REDUNDANCY, 'loss': dict(name=name)} for name in ('barlow_twins', 'vicreg', 'zero_cl', 'arb')},
  # So many features that a batch can whiten.
  'w_mse': {**REDUNDANCY, 'loss': dict(name='w_mse'), 'projector': dict(name='barlow_twins', features=(32, 4))},
  # The default weight of the invariance is for 1024 features.
  'emp_ssl': {
    **REDUNDANCY,
    'views': 3,
    'method': dict(name='emp_ssl'),
    'loss': dict(name='emp_ssl', invariance=20.0),
  },
  'dino': DINO,
  'dino_multi_crop': {**DINO, 'small_crops': SMALL_CROPS},
  'swav': {**SWAV, 'method': dict(SWAV['method'], queue=8 * BATCH, queue_epochs=1)},
  'swav_multi_crop': {**SWAV, 'small_crops': SMALL_CROPS},
}


def chosen(changes):
  made = base.get_config()
  settings = {
    'model': dict(name='resnet_tiny', width=8, stage_sizes=(1, 1), stem_stride=2),
    'projector': dict(name='simclr', features=(32, 16)),
    'data.image_size': SIZE,
    'dtype': 'float32',
    'batch_size': BATCH,
    'epochs': EPOCHS,
  }
  optimizer = dict(name='adamw', learning_rate=5e-3, weight_decay=1e-4)
  return changed(made, settings | changes | {'optimizer': optimizer | changes.get('optimizer', {})})


def prepared(images):
  """Half the size, and the lightness's distance from the background's: white shapes on black.

  Colors and contrast, which say nothing of the class and take many steps to be ignored, are gone.  [N, 32, 32, 3] ->
  [N, 16, 16, 3]
  """
  lightness = images.reshape(-1, SIZE, 2, SIZE, 2, 3).mean(axis=(2, 4, 5))
  distance = np.abs(lightness - np.median(lightness, axis=(1, 2), keepdims=True))
  white = distance / distance.max(axis=(1, 2), keepdims=True)
  return np.repeat((255 * white[..., None]).round().astype(np.uint8), 3, axis=3)


@functools.cache
def data():
  """(training images, labels, test images, labels)"""
  (train, train_labels), (test, test_labels) = embedded.generate('train', size=IMAGES), embedded.generate('test')
  return prepared(train), train_labels, prepared(test), test_labels


@functools.cache
def augmented(size, scale):
  settings = AUGMENT | dict(size=size, crop_scale=scale)
  return jax.jit(jax.vmap(augment.make(settings)))


@functools.cache
def batches(seed):
  """The (views, index) of each step, the same for all methods: VIEWS of SIZE, then CROPS of CROP pixels."""
  rng = np.random.default_rng(seed)
  index = np.concatenate([rng.permutation(IMAGES) for _ in range(MOST_EPOCHS)]).astype(np.int32)
  makers = [augmented(SIZE, (0.3, 1.0))] * VIEWS + [augmented(CROP, SMALL_CROPS['scale'])] * CROPS
  slots = jnp.arange(len(index))
  views = [make(example_keys(seed, v, slots), data()[0][index]) for v, make in enumerate(makers)]
  parted = [np.split(np.asarray(x), MOST_EPOCHS * STEPS) for x in (*views, index)]
  return [(parts[:-1], parts[-1]) for parts in zip(*parted, strict=True)]


@functools.cache
def features_of(network):
  normalize = jax.vmap(augment.make_eval(SIZE, **augment.MEAN_STD['cifar10']))
  return jax.jit(lambda variables, images: network.apply(variables, normalize(images), train=False))


def spread(embeddings):
  """The standard deviation of unit vectors times sqrt(d): 1 where they are everywhere, 0 where they are one."""
  unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
  return unit.std(axis=0).mean() * unit.shape[1] ** 0.5


def accuracy(encoder, params, batch_stats):
  """(kNN accuracy of the test images in percent, their features)"""
  train, train_labels, test, labels = data()
  variables = {'params': params['network']['encoder'], 'batch_stats': batch_stats['encoder']}
  encode = lambda x: np.concatenate([features_of(encoder)(variables, part) for part in np.split(x, len(x) // 500)])
  queries = encode(test)
  return knn.accuracy(encode(train), train_labels, queries, labels, k=(10,), topk=(1,))['knn10'], queries


@functools.cache
def untrained(seed):
  """(weights, kNN accuracy) of the random encoder that all methods start from."""
  method = methods.create(chosen({}), steps_per_epoch=STEPS, total_steps=STEPS)
  params, batch_stats, _ = method.init(jax.random.key(seed), jnp.zeros((2, SIZE, SIZE, 3)))
  return params['network']['encoder'], accuracy(method.network.encoder, params, batch_stats)[0]


def trained(name, seed):
  """(losses, the method, its last state) of a few epochs; they start from the random encoder of `untrained`."""
  made = chosen(METHODS[name])
  lengths = dict(steps_per_epoch=STEPS, total_steps=made.epochs * STEPS)
  method = methods.create(made, examples=IMAGES, **lengths)
  params, batch_stats, extra = method.init(jax.random.key(seed), jnp.zeros((2, SIZE, SIZE, 3)))
  chex.assert_trees_all_equal(params['network']['encoder'], untrained(seed)[0])
  learning_rate = optimizers.learning_rate(made.optimizer, batch_size=BATCH, **lengths)
  optimizer = optimizers.create(made.optimizer, learning_rate)
  state = State(jnp.zeros((), jnp.int32), params, batch_stats, extra, optimizer.init(params))
  kept = [*range(made.views), *range(VIEWS, VIEWS + made.small_crops.number)]
  given = [lambda key, view: view] * len(kept)  # the views are made already
  update = jax.jit(make_update(method, optimizer, learning_rate, given, seed=seed))
  losses = []
  for views, index in batches(seed)[: made.epochs * STEPS]:
    state, metrics = update(state, tuple(views[v][:, None] for v in kept), index)
    losses.append(metrics['loss'])
  return np.array(losses), method, state


@pytest.mark.parametrize('name', METHODS)
def test_every_method_learns(name):
  losses, method, state = trained(name, SEED)
  params, batch_stats = state.evaluated
  after, features = accuracy(method.network.encoder, params, batch_stats)
  assert np.isfinite(losses).all()
  assert after > untrained(SEED)[1] + 3
  # What keeps a method from collapsing acts on its projections; DINO's are scores of prototypes, and may be alike.
  if 'dino' not in name:
    variables = {'params': params['network']['projector'], 'batch_stats': batch_stats.get('projector', {})}
    features = np.asarray(method.network.projector.apply(variables, features, train=False))
  assert spread(features) > 0.3
