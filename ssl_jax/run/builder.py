"""Builds everything that training and evaluation share from a valid config."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.errors import FlaxError
from ml_collections import ConfigDict

from ssl_jax import methods
from ssl_jax.config import require_memory
from ssl_jax.data import resolve, sources
from ssl_jax.data.modality import Modality, modality_of
from ssl_jax.data.pipeline import Batches
from ssl_jax.data.views import Views, host_batches
from ssl_jax.models import torch_weights
from ssl_jax.registry import show
from ssl_jax.run import optimizers
from ssl_jax.run.devices import AXIS, Devices, jit_once
from ssl_jax.run.online_probe import OnlineProbe
from ssl_jax.run.state import State, average_of

LONGEST_CALL = 512  # maximum steps per dispatch by default; signals and progress are handled only between dispatches


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run, built and checked, with nothing compiled yet."""

  config: ConfigDict
  modality: Modality
  devices: Devices
  train: sources.Source
  on_device: bool  # whether all training examples are on the device; otherwise the host decodes and crops
  steps_per_epoch: int
  total_steps: int
  method: methods.Method
  initial_weights: Mapping[str, Any] | None  # variables of the encoder, from the file `init`
  learning_rate: optax.Schedule
  optimizer: optax.GradientTransformation
  online_probe: OnlineProbe | None
  views: Views

  @functools.cached_property
  def eval_data(self) -> dict[str, Any]:
    """The section `data` for evaluations: `config.data` with the changes in `eval.data`."""
    return resolve.eval_data(self.config)

  @functools.cached_property
  def eval_test(self) -> sources.Source:
    """The test images of evaluations."""
    return resolve.placed(self.config, self.modality.open(self.config, 'test', self.eval_data))[0]

  @functools.cached_property
  def eval_train(self) -> sources.Source:
    """The training images of evaluations, for nearest neighbors and classifiers."""
    same = all(self.eval_data[key] == self.config.data[key] for key in self.eval_data if key != 'test_split')
    if same and (self.config.eval.train_images == 'kept' or self.config.imbalance.name == 'none'):
      return self.train
    return resolve.placed(self.config, self.modality.open(self.config, 'train', self.eval_data))[0]

  def epoch(self, step: int) -> float:
    """The number of epochs after `step` steps, rounded to four decimals."""
    return round(step / self.steps_per_epoch, 4)

  @property
  def identity(self) -> dict[str, Any]:
    """What a checkpoint must match: the config, the training examples, and values of the modality."""
    known = self.config.to_dict()
    found = {'images': len(self.train), **sources.checksums(self.train), **self.modality.identity(self.train)}
    return {**known, 'data': {**known['data'], **found}}

  def initial_state(self) -> State:
    """The state before the first step, on the host."""
    inputs = self.method.network.encoder.example(self.modality.input_size(self.config))
    params, batch_stats, extra = jit_once(self.method.init)(jax.random.key(self.config.seed), inputs)
    if self.initial_weights:
      params, batch_stats, extra = self.method.start_from(self.initial_weights, params, batch_stats, extra)
    if self.config.ema:
      extra = {**extra, 'average': average_of(params, batch_stats)}
    if self.online_probe:
      features = jax.eval_shape(self.method.features, params, batch_stats, inputs)['backbone']
      extra = {**extra, 'probe': self.online_probe.init(features.shape[1])}
    state = State(jnp.zeros((), jnp.int32), params, batch_stats, extra, jit_once(self.optimizer.init)(params))
    return jax.device_get(state)

  def steps_per_call(self, steps: int) -> int:
    """The number of steps in one dispatch, for an epoch of `steps` steps."""
    on_cpu = self.devices.devices[0].platform == 'cpu'
    return self.config.parallel.steps_per_call or (1 if on_cpu else equal_part(steps, LONGEST_CALL))

  def host_batches(self, start_step: int) -> Batches:
    """This process's part of each training batch, decoded and cropped by host workers."""
    config = self.config
    return host_batches(
      config,
      self.train,
      config.seed,
      config.batch_size,
      views=config.views,
      small=config.small_crops.number,
      start_step=start_step,
      total_steps=self.total_steps,
      captions=self.modality.reader(config, self.train),
    )


def equal_part(steps: int, longest: int) -> int:
  """The length of equal parts of an epoch, at most `longest`. If nothing divides the epoch, the last part is shorter.

  Each length is compiled separately, so a divisor above half of `longest` is preferred.

  >>> equal_part(390, 512), equal_part(5004, 512), equal_part(4062, 512)
  (390, 417, 508)
  """
  if steps <= longest:
    return steps
  divisors = [part for part in range(longest // 2, longest + 1) if steps % part == 0]
  return max(divisors, default=math.ceil(steps / math.ceil(steps / longest)))


def shorten_warmup(config: ConfigDict, changed: Collection[str], planned: ConfigDict) -> str:
  """Shortens the warm-up in proportion if flags make the run no longer than the warm-up. Returns a message, or ''.

  Args:
    config: the config with the flags of the command line; modified in place.
    changed: the keys set by flags. If the warm-up is one of them, it is not shortened.
    planned: the config without the flags.
  """
  optimizer = config.optimizer
  if not {'steps', 'epochs'} & set(changed) or 'optimizer.warmup_epochs' in changed or not optimizer.warmup_epochs:
    return ''
  if not config.steps and config.epochs > optimizer.warmup_epochs:
    return ''
  per_epoch = max(len(modality_of(config).open(config)) // config.batch_size, 1)
  total, whole = (chosen.steps or chosen.epochs * per_epoch for chosen in (config, planned))
  old, warmup = optimizer.warmup_epochs, round(optimizer.warmup_epochs * per_epoch)
  if not total <= warmup < whole:
    return ''
  steps = min(max(round(warmup * total / whole), 1), total - 1)
  optimizer.warmup_epochs = round(steps / per_epoch, 6)
  return (
    f'optimizer.warmup_epochs = {old:g} is {warmup} steps, but the run has only {total}: the warm-up is shortened '
    f'to {optimizer.warmup_epochs:g} epochs (steps: {steps})'
  )


def build(config: ConfigDict, *, resumed: bool = False, trains: bool = True) -> Run:
  """Builds a run from a valid config. Further errors in the config are found before any image is decoded.

  If `resumed`, the weights come from a checkpoint, and the file `init` is not read. If not `trains`, the batch size is
  not checked.
  """
  devices = Devices.choose(config.parallel.map, config.parallel.devices)
  modality = modality_of(config)
  count = len(devices.devices)
  if trains and config.batch_size % count:
    near = max(config.batch_size // count, 1) * count
    raise ValueError(
      f'batch_size = {config.batch_size} must be divisible by the {count} devices: try {near}, or set parallel.devices'
    )
  if config.eval.file:
    raise ValueError(f'eval.file = {config.eval.file!r} is only for --mode=evaluate: leave it out')
  views = modality.views(config, on_device=True)
  resolve.eval_data(config)  # raises for a section eval.data that does not locate a dataset
  parts = methods.parts(config, AXIS)
  if trains:
    _check_microbatches(parts.method.parameters.get('microbatches', 1), config.batch_size, count)
  modality.check(config, parts.network.encoder)
  starts_from_file = config.init not in ('', 'random') and not resumed
  if starts_from_file:
    modality.check_weights(config)
  source = modality.open(config)
  modality.check_source(config, parts.network, source)
  run = _assemble(config, modality, devices, source, parts, views, trains)
  _check_network(run)
  weights = None
  if starts_from_file:
    weights = torch_weights.load(config.init, run.method.network.encoder, modality.input_size(config))
  train, on_device = modality.place(config, source)
  if len(train) != len(source):  # broken images were left out
    run = _assemble(config, modality, devices, train, parts, views, trains)
  if not on_device:
    views = modality.views(config, on_device=False)
  return dataclasses.replace(run, train=train, on_device=on_device, views=views, initial_weights=weights)


def _assemble(
  config: ConfigDict,
  modality: Modality,
  devices: Devices,
  source: sources.Source,
  parts: methods.Parts,
  views: Views,
  trains: bool,
) -> Run:
  """The run on a source, which need not be decoded yet. It has no initial weights."""
  if not len(source):
    raise ValueError(f'data.train_split = {config.data.train_split!r} has no readable image: check data.path')
  if trains and len(source) < config.batch_size:
    raise ValueError(
      f'batch_size = {config.batch_size} must not exceed the {len(source)} training {modality.name}: lower it'
    )
  online_probe = None
  if config.online_probe:
    if source.labels is None:
      raise ValueError(
        f'online_probe = {config.online_probe} needs labels, but data.train_split has none: set online_probe=0'
      )
    online_probe = OnlineProbe(source.labels, config.online_probe)
  steps_per_epoch = max(len(source) // config.batch_size, 1)
  clock = dict(steps_per_epoch=steps_per_epoch, total_steps=config.steps or config.epochs * steps_per_epoch)
  if clock['total_steps'] >= 2**31:  # the step counter is int32
    raise ValueError(f'epochs = {config.epochs} of {steps_per_epoch} steps must be at most {2**31 - 1} steps: lower it')
  learning_rate = optimizers.learning_rate(config.optimizer, batch_size=config.batch_size, **clock)
  peak = optimizers.peak_learning_rate(config.optimizer, config.batch_size)
  return Run(
    config=config,
    modality=modality,
    devices=devices,
    train=source,
    on_device=True,
    method=methods.create(config, examples=len(source), axis_name=AXIS, built=parts, **clock),
    initial_weights=None,
    learning_rate=learning_rate,
    optimizer=optimizers.create(config.optimizer, learning_rate, peak),
    online_probe=online_probe,
    views=views,
    **clock,
  )


def _check_microbatches(number: int, batch_size: int, devices: int) -> None:
  """Raises a ValueError unless each device's part of a batch can be split into microbatches of equal size."""
  local = batch_size // devices
  if local % number:
    near = max(n for n in range(1, min(number, local) + 1) if local % n == 0)
    on = f' on each of the {devices} devices' if devices > 1 else ''
    raise ValueError(f'method.microbatches = {number} must divide the {local} examples of a batch{on}: try {near}')


def _check_network(run: Run) -> None:
  """Traces the network without compiling it, to report incompatible sizes and types in one line."""
  config, method = run.config, run.method
  inputs = method.network.encoder.example(run.modality.input_size(config))
  try:
    shapes = jax.eval_shape(method.init, jax.random.key(0), inputs)
    params, stats, _ = shapes
    if not all(weight.size for weight in jax.tree.leaves(params)):
      raise TypeError('a layer has no width')
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    require_memory('the network', needed, f'make it smaller ({_network_settings(config)})')
    if config.optimizer.fixed_predictor and method.predictor is None:
      raise ValueError(
        f'optimizer.fixed_predictor = True needs a predictor, and {config.method.name!r} has none: set it to False'
      )
    if method.predictor not in (None, 'prototypes'):
      _check_predictor(run, inputs)
    _check_smaller_views(run, params, stats)
  except (TypeError, ZeroDivisionError, OverflowError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ValueError(f'the network cannot be built ({reason}): check {_network_settings(config)}') from error


def _network_settings(config: ConfigDict) -> str:
  return ', '.join(f'{name} = {show(config[name])}' for name in ('model', 'projector', 'method'))


def _check_predictor(run: Run, inputs: jax.Array) -> None:
  """Raises a ValueError if the predictor's output and the projections that it predicts differ in width."""
  network, config = run.method.network, run.config
  outputs = lambda: network.init_with_output(jax.random.key(0), inputs, train=False, predict=True)[0]
  widths = {name: x.shape[1] for name, x in jax.eval_shape(outputs).items()}
  if widths['projector'] != widths['predictor']:
    raise ValueError(
      f'projector.name = {config.projector.name!r} gives {widths["projector"]} features, but the predictor of '
      f'{config.method.name!r} gives {widths["predictor"]}: set projector.features or method.predictor'
    )


def _check_smaller_views(run: Run, params: Any, stats: Any) -> None:
  """Raises a ValueError for smaller views if the encoder's weights depend on the image size."""
  config, encoder = run.config, run.method.network.encoder
  small, size = config.small_crops, config.augment.get('size')
  smaller = [('augment.size', size, 'leave it out')] if size else []
  smaller += [('small_crops.size', small.size, 'set small_crops.number=0')] if small.number else []
  for key, value, fix in smaller:
    try:
      jax.eval_shape(run.method.features, params, stats, encoder.example(value))
    except FlaxError as error:
      raise ValueError(
        f'{key} = {value} does not fit model.name = {config.model.name!r}, whose weights are for images of '
        f'{config.data.image_size} pixels: {fix}, or use a ResNet'
      ) from error
