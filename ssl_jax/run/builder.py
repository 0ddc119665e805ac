"""From a sound config to everything that training and evaluation share."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.errors import FlaxError
from ml_collections import ConfigDict

from ssl_jax import methods, models
from ssl_jax.config import flatten
from ssl_jax.data import augment, imbalance, pipeline, sentences, sources
from ssl_jax.models import bert, torch_weights
from ssl_jax.registry import nearest
from ssl_jax.run import optimizers
from ssl_jax.run.devices import AXIS, Devices
from ssl_jax.run.online_probe import Probe
from ssl_jax.run.state import State, average_of

ON_DEVICE_LIMIT = 4 * 2**30  # bytes of decoded training images that `data.on_device=auto` puts on the device


@dataclasses.dataclass(frozen=True)
class Run:
  """A run's parts, built and checked, with nothing compiled yet."""

  config: ConfigDict
  devices: Devices
  train: sources.Source
  on_device: bool  # whether all training images live on the device; else host workers decode and crop
  steps_per_epoch: int
  total_steps: int
  method: methods.Method
  start: Mapping | None  # the encoder's variables of the file `init`, where it begins with them
  rate: optax.Schedule
  optimizer: optax.GradientTransformation
  probe: Probe | None
  augments: list[Callable]  # one a view, those of small crops last
  normalize: Callable  # uint8 image -> what evaluations show the encoder
  denormalize: Callable | None  # what the encoder sees -> uint8 image, for pictures; sentences have none

  @functools.cached_property
  def judged(self) -> dict:
    """The section `data` of evaluations: what `eval.data` names, and the rest as in training."""
    return judged(self.config)

  @functools.cached_property
  def test(self) -> sources.Source:
    return _load(self.config, 'test', self.judged)[0]

  @functools.cached_property
  def known(self) -> sources.Source:
    """The training images that evaluations find neighbours among and train classifiers on."""
    trained = {key: self.judged[key] == self.config.data[key] for key in self.judged if key != 'test_split'}
    if all(trained.values()) and (self.config.eval.train_images == 'kept' or self.config.imbalance.name == 'none'):
      return self.train
    return _load(self.config, 'train', self.judged)[0]

  @property
  def identity(self) -> dict:
    """What a checkpoint belongs to: the config, how many training images it found, and the numbers of words."""
    known, found = self.config.to_dict(), {'images': len(self.train)}
    if of_text(self.config):
      found['words'] = self.train.vocabulary.digest
    return {**known, 'data': {**known['data'], **found}}

  def initial_state(self) -> State:
    """The state before the first step, on the host."""
    images = models.example(self.method.network.encoder, input_size(self.config))
    params, batch_stats, extra = jax.jit(self.method.init)(jax.random.key(self.config.seed), images)
    if self.start:
      params, batch_stats, extra = self.method.start_from(self.start, params, batch_stats, extra)
    if self.config.ema:
      extra = {**extra, 'average': average_of(params, batch_stats)}
    if self.probe:
      features = jax.eval_shape(self.method.features, params, batch_stats, images)['backbone']
      extra = {**extra, 'probe': self.probe.init(features.shape[1])}
    state = State(jnp.zeros((), jnp.int32), params, batch_stats, extra, jax.jit(self.optimizer.init)(params))
    return jax.device_get(state)

  def steps_per_call(self, epoch: int) -> int:
    """How many steps are scanned in one dispatch where an epoch has so many."""
    on_cpu = self.devices.devices[0].platform == 'cpu'
    return self.config.parallel.steps_per_call or (1 if on_cpu else epoch)

  def host_batches(self, start_step: int):
    """Batches from host workers: this process's part of each, decoded and cropped."""
    config = self.config
    settings = dict(small=config.small_crops.number, start_step=start_step, total_steps=self.total_steps)
    return host_batches(config, self.train, config.seed, config.batch_size, views=config.views, **settings)


def prepare(config: ConfigDict, *, resumed: bool = False, trains: bool = True) -> Run:
  """Finds whatever is wrong with a valid config: devices first, then names and parameters, then the data.

  A `resumed` run has its weights in a checkpoint, and does not need the file `init` any more. One that no longer
  `trains` has no use for its batch.
  """
  devices = Devices.choose(config.parallel.map, config.parallel.devices)
  count = len(devices.devices)
  if trains and config.batch_size % count:
    near = max(config.batch_size // count, 1) * count
    raise ValueError(
      f'batch_size = {config.batch_size} does not divide over {count} devices: try {near}, or parallel.devices'
    )
  encoder = try_network(config)  # a mistake is told before the data is read
  given = config.init not in ('', 'random') and not resumed
  if given and of_text(config) and not config.data.vocabulary:
    raise ValueError(f"data.vocabulary = '' does not number words as init = {config.init!r} does: give its vocab.txt")
  start = torch_weights.load(config.init, encoder, input_size(config)) if given else None
  augments_of(config, on_device=True)
  judged(config)
  kept = imbalance.create(config.imbalance)
  train, on_device = _load(config, 'train', kept=kept)
  if not len(train):
    raise ValueError(f'data.train_split = {config.data.train_split!r} has no readable image: look at data.path')
  if trains and len(train) < config.batch_size:
    what = 'sentences' if of_text(config) else 'training images'
    raise ValueError(f'batch_size = {config.batch_size} is larger than the {len(train)} {what}: lower it')
  if of_text(config) and encoder.vocabulary < len(train.vocabulary):
    pieces = f'{len(train.vocabulary):,} pieces of {config.data.vocabulary or "the vocabulary of the sentences"}'
    raise ValueError(f'model.vocabulary = {encoder.vocabulary} is less than the {pieces}: raise it')
  steps_per_epoch = max(len(train) // config.batch_size, 1)
  lengths = dict(steps_per_epoch=steps_per_epoch, total_steps=config.steps or config.epochs * steps_per_epoch)
  rate = optimizers.rate(config.optimizer, batch_size=config.batch_size, **lengths)
  if config.probe and train.labels is None:
    raise ValueError(f'probe = {config.probe} needs labels, and data.train_split has none: set probe=0')
  augments, normalize, denormalize = augments_of(config, on_device)
  return Run(
    config=config,
    devices=devices,
    train=train,
    on_device=on_device,
    method=methods.create(config, examples=len(train), axis_name=AXIS, **lengths),
    start=start,
    rate=rate,
    optimizer=optimizers.create(config.optimizer, rate),
    probe=Probe(train.labels, config.probe) if config.probe else None,
    augments=augments,
    normalize=normalize,
    denormalize=denormalize,
    **lengths,
  )


def try_network(config) -> nn.Module:
  """The encoder of a config, whose network was traced, so that sizes and types that cannot be are told in one line."""
  try:
    method = methods.create(config, steps_per_epoch=1, total_steps=1)
    check_kind(config, method.network.encoder)
    images = models.example(method.network.encoder, input_size(config))
    params, stats, _ = jax.eval_shape(method.init, jax.random.key(0), images)
    if not all(weight.size for weight in jax.tree.leaves(params)):
      raise TypeError('a layer has no width')
    if method.predictor not in (None, 'prototypes'):
      _check_predictor(config, method.network, images)
    if config.small_crops.number:
      _check_small_crops(config, method, params, stats)
    return method.network.encoder
  except (TypeError, ZeroDivisionError, OverflowError) as error:
    parts = ', '.join(f'{name} = {config[name].to_dict()}' for name in ('model', 'projector', 'method'))
    raise ValueError(f'these do not make a network ({str(error).splitlines()[0]}): {parts}') from error


def _check_predictor(config, network, images) -> None:
  """Refuses a predictor that cannot be compared with what it predicts."""
  outputs = lambda: network.init_with_output(jax.random.key(0), images, train=False, predict=True)[0]
  widths = {name: x.shape[1] for name, x in jax.eval_shape(outputs).items()}
  if widths['projector'] != widths['predictor']:
    raise ValueError(
      f'projector.name = {config.projector.name!r} gives {widths["projector"]} features, and the predictor of '
      f'{config.method.name!r} {widths["predictor"]}: set projector.features or method.predictor'
    )


def _check_small_crops(config, method, params, stats) -> None:
  """Refuses small crops for an encoder whose weights fit images of one size alone."""
  size = config.small_crops.size
  try:
    jax.eval_shape(method.features, params, stats, models.example(method.network.encoder, size))
  except FlaxError as error:
    raise ValueError(
      f'small_crops.size = {size} does not go with model.name = {config.model.name!r}, whose weights are of images of '
      f'{config.data.image_size} pixels: set small_crops.number=0, or take a ResNet'
    ) from error


# What has no meaning for sentences, with the value that says so.
OF_IMAGES = {
  'augment.name': 'dropout',
  'small_crops.number': 0,
  'imbalance.name': 'none',
  'probe': 0.0,
  'data.stored_size': 0,
  'data.classes': '',
  'eval.k': [],
  'eval.linear': '',
  'eval.finetune': '',
  'eval.measures': False,
  'eval.data.name': '',
}
# And for images.
OF_TEXT = {'data.vocabulary': '', 'eval.sts': ''}


def of_text(config: ConfigDict) -> bool:
  """Whether a run is of sentences; else it is of images."""
  return config.data.source == 'text'


def examples(config: ConfigDict) -> str:
  """What a run is of, in a word."""
  return 'sentences' if of_text(config) else 'images'


def input_size(config: ConfigDict) -> int:
  """Of what the encoder takes: pixels a side, or tokens."""
  return config.data.tokens if of_text(config) else config.data.image_size


def check_kind(config: ConfigDict, encoder: nn.Module) -> None:
  """Refuses an encoder of sentences for images, or the other way round, and what has no meaning for sentences."""
  if isinstance(encoder, models.BERT) != of_text(config):
    mend = 'bert_base, or another source' if of_text(config) else 'data.source=text, or another encoder'
    raise ValueError(
      f'model.name = {config.model.name!r} does not read data.source = {config.data.source!r}: give {mend}'
    )
  given = flatten(config)
  for key, value in (OF_IMAGES if of_text(config) else OF_TEXT).items():
    if given[key] != value:
      raise ValueError(f'{key} = {given[key]!r} has no meaning for {examples(config)}: set {key}={value!r}')
  if not of_text(config):
    return
  if further := [key for key in given if key.startswith('augment') and key != 'augment.name']:
    raise ValueError(
      f'{further[0]} = {given[further[0]]!r} has no meaning for sentences: drop it, or set model.dropout'
    )
  if config.data.on_device == 'no':
    raise ValueError("data.on_device = 'no' has no meaning for sentences, which are small: set data.on_device='auto'")
  if config.eval.sts and not pathlib.Path(config.eval.sts).expanduser().is_dir():
    raise ValueError(f'eval.sts = {config.eval.sts!r} is no folder: give one with sts12.tsv, stsb.tsv, ...')


def stored_size(config: ConfigDict) -> int:
  """Pixels a side of images in memory, which views are cropped from."""
  return config.data.stored_size or config.data.image_size


def judged(config: ConfigDict) -> dict:
  """The section `data`, with what `eval.data` changes in it."""
  changes = {key: value for key, value in config.eval.data.items() if value}
  for key in {'source', 'path'} & changes.keys():
    if 'name' not in changes:
      raise ValueError(f'eval.data.{key} = {changes[key]!r} is of another set: give it a name too, by eval.data.name')
  source = changes.get('source', config.data.source)
  if 'name' in changes and source != 'tfds' and not {'source', 'path'} & changes.keys():
    raise ValueError(
      f'eval.data.name = {changes["name"]!r} alone finds no set of data.source = {source!r}: give eval.data.path, or '
      'eval.data.source=tfds'
    )
  another = {'classes': ''} if 'name' in changes else {}
  elsewhere = {'path': ''} if 'source' in changes else {}  # a folder's path says nothing of where tfds keeps its sets
  return {**config.data.to_dict(), **another, **elsewhere, **changes}


def fits(config: ConfigDict, source: sources.Source) -> bool:
  """Whether the images of a source are to be in memory, and on the device."""
  small = source.nbytes_decoded(stored_size(config)) <= ON_DEVICE_LIMIT
  return {'yes': True, 'no': False, 'auto': small}[config.data.on_device]


def _load(config, split, data=None, kept=None) -> tuple[sources.Source, bool]:
  """The source of a split, thinned by the rule `kept`, and whether it is in memory at its final size.

  `data` is the section of evaluations, where they have their own images. The config alone decides what is in memory;
  sentences always are.
  """
  if of_text(config):
    return sentences.load(config.data), True
  size = stored_size(config)
  try:
    source = sources.load(data or config.data, split)
  except ValueError as error:
    if data in (None, config.data.to_dict()):
      raise
    raise ValueError(f'eval.data: {error}') from error
  if kept:
    if source.labels is None:
      name, held = config.imbalance.name, config.data[f'{split}_split']
      raise ValueError(f'imbalance.name = {name!r} needs labels, and data.{split}_split = {held!r} has none: set none')
    source = source.subset(kept(source.labels))
  if fits(config, source):
    return source.in_memory(size), True
  return source, False


def augment_settings(config) -> tuple[dict, dict]:
  """The preset that `augment` names, with what the config changes in it: for the first view, and for the second."""
  changes = dict(config.augment)
  name = changes.pop('name')
  if name not in augment.PRESETS:
    raise ValueError(f'augment.name = {name!r} does not exist: {nearest(name, list(augment.PRESETS))}')
  for section in ('augment', 'augment_other'):
    if 'size' in config[section]:
      raise ValueError(f'{section}.size = {config[section]["size"]!r} is not set here: set data.image_size')
  settings = augment.validate(augment.PRESETS[name] | changes)
  augment.validate(dict(config.augment_other), 'augment_other')
  return settings, settings | dict(config.augment_other)


def host_batches(
  config, source, seed: int, batch_size: int, *, views: int, small: int = 0, total_steps: int, start_step: int = 0
):
  """This process's part of each batch of a source, decoded by the host and cropped for so many views and small ones."""
  both = augment_settings(config)
  first, other = (
    pipeline.Crop(config.data.image_size, s['crop_scale'] if s['crop'] else None, s['crop_ratio'], s['interpolation'])
    for s in both
  )
  crops = [other if v % 2 else first for v in range(views)]
  crops += [first._replace(size=config.small_crops.size, scale=config.small_crops.scale)] * small
  return pipeline.batches(
    source,
    seed=seed,
    batch_size=batch_size,
    start_step=start_step,
    total_steps=total_steps,
    crops=crops,
    num_workers=config.data.workers,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )


def augments_of(config, on_device: bool):
  """The augmentation of each view, the view that evaluations take, and the way back to pixels."""
  if of_text(config):
    return [bert.view] * config.views, bert.seen, None
  common = dict(size=config.data.image_size) | ({} if on_device else dict(crop=False))  # the host has cropped already
  settings, other = (s | common for s in augment_settings(config))
  if on_device and not (settings['crop'] and other['crop']):
    larger = config.data.stored_size if stored_size(config) != config.data.image_size else 0
    for key, value in {'data.stored_size': larger, 'small_crops.number': config.small_crops.number}.items():
      if value:
        raise ValueError(f'{key} = {value} needs random crops: set augment.crop=True, or {key}=0')
  small = dict(size=config.small_crops.size, crop_scale=config.small_crops.scale)
  augments = [augment.make(other if v % 2 else settings) for v in range(config.views)]
  augments += [augment.make(settings | small) for _ in range(config.small_crops.number)]
  mean, std = np.float32(settings['mean']), np.float32(settings['std'])
  denormalize = lambda x: np.uint8(np.clip(np.rint((np.asarray(x) * std + mean) * 255), 0, 255))
  shown = augment.make_eval(config.data.image_size, settings['mean'], settings['std'], crop=config.eval.crop)
  return augments, shown, denormalize
