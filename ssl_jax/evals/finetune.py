"""Supervised training with random crops and flips: fine-tuning, or a linear classifier on the frozen encoder.

It uses all labels, a fraction of each class, or a few labels per class.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from ml_collections import ConfigDict

from ssl_jax.arrays import cross_entropy
from ssl_jax.data import pipeline
from ssl_jax.data.resolve import fits, stored_size
from ssl_jax.data.views import augment_settings, host_batches, image_views
from ssl_jax.evals import check, features, linear
from ssl_jax.evals.scoring import classes_before, mean_and_spread, percent
from ssl_jax.registry import require, require_choice
from ssl_jax.run.builder import Run
from ssl_jax.run.devices import AXIS
from ssl_jax.run.state import State
from ssl_jax.run.update import example_keys, scan_update


@dataclasses.dataclass(frozen=True)
class FineTuning(linear.Protocol):
  """How the encoder and a linear classifier are trained together."""

  class_weights: tuple[float, ...] = ()  # one per class; (): all 1


# DySTreSS A.2. Momentum 0.9, no weight decay, and a softmax also for two classes are our choices.
FULL = FineTuning('DySTreSS A.2', 'sgd', 0.1, 128, 50, (30, 40), 0.1, scale='none')

# The labels that are used: all (None), a fraction of each class, or a number per class.
LABELS = {'all': None, '10%': 0.1, '1%': 0.01, '5-shot': 5}
CHOICES = ('', *LABELS, 'linear', *(f'linear {labels}' for labels in LABELS if labels != 'all'))  # of eval.finetune
FROZEN_PROTOCOL = 'balanced_cifar'  # of a linear classifier with augmentation, if eval.linear names no protocol
ALL_BUT_CROP_AND_FLIP = ('jitter', 'grey', 'blur', 'solarize', 'cutout', 'rotation', 'noise')


def parse(choice: str) -> tuple[bool, str]:
  """Whether `eval.finetune` freezes the encoder, and which of `LABELS` it uses."""
  frozen, _, labels = choice.rpartition(' ')
  return (True, 'all') if choice == 'linear' else (frozen == 'linear', labels)


def chosen_labels(labels: np.ndarray, which: str, seed: int) -> np.ndarray:
  """The sorted positions of the training images whose labels are used, drawn with the seed.  [n] -> [m]"""
  require_choice('labels', which, LABELS)
  amount = LABELS[which]
  if amount is None:
    return np.arange(len(labels))
  rng = np.random.default_rng(seed)
  chosen = []
  for c in np.unique(labels):
    own = rng.permutation(np.flatnonzero(labels == c))
    if isinstance(amount, int) and len(own) < amount:
      raise ValueError(
        f'labels = {which!r} is more than the {len(own)} training images of class {c}: use a share, such as 10%'
      )
    chosen.append(own[: amount if isinstance(amount, int) else max(1, round(amount * len(own)))])
  return np.sort(np.concatenate(chosen))


def require_weights(weights: Sequence[float], classes: int) -> None:
  """Raises a ValueError if class weights are given, but not one for each class."""
  holds = lambda given: len(given) in (0, classes)
  require('eval.class_weights', tuple(weights), holds, f'one number for each of the {classes} classes, or ()')


def _plain(config: ConfigDict, crop_scale: tuple[float, float] | None = None) -> ConfigDict:
  """The config of the run, with its augmentation reduced to crops of `data.image_size` and flips."""
  plain = ConfigDict(config.to_dict())
  if crop_scale:
    plain.augment.crop_scale = crop_scale
  plain.augment.update({name: 0.0 for name in ALL_BUT_CROP_AND_FLIP})
  if 'size' in plain.augment:
    del plain.augment['size']
  plain.augment_other = {}
  return plain


def _crops_and_flips(config: ConfigDict, on_device: bool) -> Callable:
  """The augmentation of a `_plain` config. The host crops images that are not on the device."""
  return image_views(config, on_device).training[0]


def evaluate(run: Run, state: State) -> dict:
  """Runs the training selected by `eval.finetune`: {'finetune': percent, ...}. The state is on the host."""
  choice = run.config.eval
  frozen, labels = parse(choice.finetune)
  settings = dict(labels=labels, frozen=frozen, seeds=choice.seeds)
  if frozen:
    protocol = linear.PROTOCOLS.get(choice.linear, linear.PROTOCOLS[FROZEN_PROTOCOL])
    settings |= dict(protocol=protocol)
  else:
    changes = dict(learning_rate=choice.finetune_learning_rate, class_weights=tuple(choice.class_weights))
    settings |= dict(protocol=dataclasses.replace(FULL, **changes))
  found = finetune(run, state, **settings)
  return {
    'finetune': found['top1'],
    'finetune_std': found['top1_std'],
    'finetune_top5': found['top5'],
    'finetune_protocol': f'{"linear with augmentation" if frozen else "fine-tuned"}, labels: {labels}',
    'finetune_settings': linear.settings_of(found),
  }


@dataclasses.dataclass(frozen=True)
class _Classifier:
  """A linear classifier on an encoder, as pure functions."""

  run: Run
  frozen: bool
  center: np.ndarray  # [d], subtracted from the features
  scale: np.ndarray  # [], divides the centered features

  def logits(self, params, stats, images, train: bool):
    """[b, H, W, 3] -> [b, classes] and the new running statistics"""
    encoder, variables = self.run.method.network.encoder, {'params': params['encoder'], 'batch_stats': stats}
    if train and not self.frozen:
      x, changed = encoder.apply(variables, images, train=True, mutable=['batch_stats'])
      stats = changed.get('batch_stats', {})
    else:
      x = encoder.apply(variables, images, train=False)
    x = (jnp.asarray(x, jnp.float32) - self.center[None, :]) / self.scale
    if self.frozen:
      x = lax.stop_gradient(x)
    return linear.logits(params['head'], x), stats

  def trained(self, params):
    return {'head': params['head']} if self.frozen else params

  def update(self, direction, augment, labels, weights, seed):
    """Returns (state, images, positions) -> (state, loss) for this device's images. `labels` are for all images."""

    def update(state, images, positions):
      keys = example_keys(seed, state['step'], positions)
      images, own_labels = jax.vmap(augment)(keys, images), labels[positions]

      def loss(trained):
        logits, stats = self.logits({**state['params'], **trained}, state['stats'], images, train=True)
        weight = weights[own_labels]
        return jnp.sum(weight * cross_entropy(logits, own_labels)) / lax.pmean(jnp.sum(weight), AXIS), stats

      trained = self.trained(state['params'])
      (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(trained)
      updates, opt = direction.update(lax.pmean(grads, AXIS), state['opt'], trained)
      trained = jax.tree.map(lambda p, u: p - state['learning_rate'] * u, trained, updates)
      changed = dict(params={**state['params'], **trained}, stats=stats, opt=opt, step=state['step'] + 1)
      return {**state, **changed}, lax.pmean(value, AXIS)

    return update


def finetune(
  run: Run,
  state: State,
  *,
  labels: str = 'all',
  protocol: linear.Protocol = FULL,
  frozen: bool = False,
  seeds: Sequence[int] = (0,),
) -> dict:
  """Trains a classifier on a run's encoder, fine-tuned or frozen, and tests it. The state is on the host.

  Args:
    labels: one of `LABELS`.
    protocol: optimizer, learning rate, batch size and epochs; those of linear classifiers are in `linear.PROTOCOLS`.
    frozen: whether only the linear classifier is trained. Its inputs are centered and scaled as in `linear`, with the
      statistics of the images whose labels are used. Otherwise, the encoder is trained, too.
    seeds: for the choice of labels, the initial classifier, the order of images and the augmentation.

  Returns:
    'top1' and 'top5' in percent (means over seeds), 'top1_std', 'top1_seeds', and the settings; ready for JSON.
  """
  linear.require_seeds(seeds)
  train_labels = check.labels('training labels', run.eval_train.labels, len(run.eval_train))
  test_labels = check.labels('test labels', run.eval_test.labels, len(run.eval_test))
  check.seen('test labels', test_labels, 'training labels', train_labels)
  found = [_one_seed(run, state, train_labels, labels, protocol, frozen, int(seed)) for seed in seeds]
  top1, top5 = ([percent(before) for before in hits] for hits in zip(*found, strict=True))
  mean, std = mean_and_spread(top1)
  images = len(chosen_labels(train_labels, labels, int(seeds[0])))
  settings = {'labels': labels, 'frozen': frozen, 'seeds': [int(seed) for seed in seeds]}
  settings |= {'images': images, 'classes': int(train_labels.max()) + 1, 'encoder': run.config.model.name}
  batch, scale = _batch(protocol, images, len(run.devices.devices))
  settings |= dataclasses.asdict(protocol) | {'batch': batch, 'learning_rate_scale': scale}
  settings['crop_scale'] = augment_settings(_plain(run.config, protocol.crop_scale))[0]['crop_scale']
  return {'top1': mean, 'top1_std': std, 'top1_seeds': top1, 'top5': mean_and_spread(top5)[0], **settings}


def _one_seed(run: Run, state: State, train_labels, which, protocol, frozen, seed) -> tuple[np.ndarray, np.ndarray]:
  """Whether each test image is classified correctly, by top-1 and by top-5.  -> bool [m], bool [m]"""
  config, devices = run.config, run.devices
  chosen = chosen_labels(train_labels, which, seed)
  classes = int(train_labels.max()) + 1
  source, labels = run.eval_train.subset(chosen), train_labels[chosen]
  model, fitted = _fit(run, state, source, labels, classes, protocol, frozen, seed)

  def predict(params, stats, images, positions):
    del positions
    return {'logits': model.logits(params, stats, jax.vmap(run.views.eval_view)(images), train=False)[0]}

  predict = devices.map(predict, replicated=2, sharded=2, out='sharded')
  fix = 'choose another eval.linear' if frozen else 'lower eval.finetune_learning_rate'
  found, labels = features.extract(
    predict,
    devices,
    fitted['params'],
    fitted['stats'],
    run.eval_test,
    size=features.image_size(config),
    batch_size=config.eval.batch_size,
    what='logits of eval.finetune',
    fix=f'its training diverged at learning rate {protocol.learning_rate:g}, so {fix}',
  )
  assert labels is not None
  before = classes_before(found['logits'], labels)
  return before < 1, before < 5


def _fit(run: Run, state: State, source, labels, classes, protocol, frozen, seed) -> tuple[_Classifier, dict]:
  """Trains a classifier. Returns it and its state (parameters, running statistics, ...) on the devices."""
  config, devices = run.config, run.devices
  in_memory = source.ready(stored_size(config)) and fits(config, source)
  cropped = dataclasses.replace(run, config=_plain(config, protocol.crop_scale))
  augment = _crops_and_flips(cropped.config, in_memory)
  evaluated, statistics = state.evaluated
  encoder, stats = evaluated['network']['encoder'], statistics.get('encoder', {})
  variables = {'params': encoder, 'batch_stats': stats}
  width = features.width(run.method.network.encoder, variables, run.config.data.image_size)
  moments = _moments(run, state, source, protocol.scale) if frozen else (np.zeros(width), np.ones(()))
  model = _Classifier(run, frozen, *(np.asarray(x, np.float32) for x in moments))
  head = {'kernel': linear.initial_kernels([seed], width, classes)[0], 'bias': np.zeros(classes, np.float32)}
  params = {'encoder': encoder, 'head': head}
  direction = protocol.direction()
  if frozen:  # LARS distinguishes the kernel from the bias by name
    direction = _on_head(direction)
  given = protocol.class_weights if isinstance(protocol, FineTuning) else ()
  require_weights(given, classes)
  weights = jnp.asarray(given or (1.0,) * classes, jnp.float32)
  update = model.update(direction, augment, jnp.asarray(labels), weights, seed)
  opt = jax.device_get(direction.init(model.trained(params)))
  fitted = devices.replicate(dict(params=params, stats=stats, opt=opt, step=np.int32(0), learning_rate=np.float32(0)))
  batch, scale = _batch(protocol, len(source), len(devices.devices))
  rates = [protocol.learning_rate * factor * scale for factor in protocol.factors()]
  epochs = _device_epochs if in_memory else _host_epochs
  with epochs(cropped, source, update, batch, len(rates), seed) as train:
    for epoch, rate in enumerate(rates):
      fitted = train(fitted | dict(learning_rate=devices.replicate(np.float32(rate))), epoch)
  return model, fitted


def _batch(protocol, images: int, devices: int) -> tuple[int, float]:
  """The batch size, which is smaller if there are few images, and the factor of the learning rate that this implies."""
  batch = min(protocol.batch, images) // devices * devices
  if not batch:
    raise ValueError(f'labels: only {images} images for {devices} devices; use fewer devices or more labels')
  return batch, batch / protocol.batch if protocol.optimizer == 'sgd' else 1.0  # linear scaling


def _moments(run: Run, state: State, source, scale: str) -> tuple[jax.Array, jax.Array]:
  """`linear.moments` of the backbone features of a source. `eval.flip` and `eval.patches` have no effect."""
  apply = features.extractor(run.method.features, run.views.eval_view, run.devices, ('backbone',))
  sizes = dict(size=features.image_size(run.config), batch_size=run.config.eval.batch_size)
  params, stats = run.devices.replicate(state.evaluated)
  found, _ = features.extract(apply, run.devices, params, stats, source, **sizes)
  return linear.moments(found['backbone'], scale=scale)


def _in_turn(call, ahead: int = 2):
  """Wraps `call`: ... -> (state, loss) to return only the state and to leave at most `ahead` calls unfinished.

  On virtual CPU devices, a long queue of calls starves the threads in which the devices of the first call synchronize.
  """
  losses: collections.deque[jax.Array] = collections.deque()

  def run(*arguments):
    state, loss = call(*arguments)
    losses.append(loss)
    if len(losses) > ahead:
      jax.block_until_ready(losses.popleft())
    return state

  return run


@contextlib.contextmanager
def _device_epochs(run: Run, source, update, batch, epochs, seed):
  """Yields (state, epoch) -> state, which trains for one epoch. The images are copied to the devices only once."""
  del epochs
  devices = run.devices
  many = _in_turn(devices.map(scan_update(update), replicated=2, sharded=1, donate=(0,)))
  dataset, steps = devices.replicate(source.items), len(source) // batch
  length = run.steps_per_call(steps)

  def train(state, epoch):
    order = pipeline.order(seed, epoch, len(source))[: steps * batch].reshape(steps, batch)
    for start in range(0, steps, length):
      index = np.split(order[start : start + length], jax.process_count(), axis=1)[jax.process_index()]
      state = many(state, dataset, devices.shard(index.T.astype(np.int32)))
    return state

  yield train


@contextlib.contextmanager
def _host_epochs(run: Run, source, update, batch, epochs, seed):
  """Like `_device_epochs`, for images that the host decodes and crops a few batches ahead."""
  devices, steps = run.devices, len(source) // batch
  one = _in_turn(devices.map(update, replicated=1, sharded=2, donate=(0,)))
  host = host_batches(run.config, source, seed, batch, views=1, total_steps=epochs * steps)
  with contextlib.closing(host):
    ahead = pipeline.prefetch(host, lambda read: devices.shard((read['images'][0][:, 0], read['index'])))

    def train(state, epoch):
      del epoch  # the batches arrive in the order of the epochs
      for images, index in itertools.islice(ahead, steps):
        state = one(state, images, index)
      return state

    yield train


def _on_head(direction: optax.GradientTransformation) -> optax.GradientTransformation:
  """Adapts `direction` to a tree {'head': params}."""

  def update(grads, state, params):
    updates, state = direction.update(grads['head'], state, params['head'])
    return {'head': updates}, state

  return optax.GradientTransformation(lambda params: direction.init(params['head']), update)
