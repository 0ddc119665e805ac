"""Validates a config: its keys, types, choices and ranges, and the memory that it needs."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ssl_jax.config.loading import NAMED, flatten, require_keys, same_type
from ssl_jax.registry import FLOAT32, in_float32, is_whole, nearest, require, require_choice, show

SEEDS = 2**31  # a seed must fit in an int32

# Choices that no other module defines. Names of sources, optimizers and evaluations are checked where they are defined.
CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'data.on_device': ('auto', 'yes', 'no'),
  'parallel.map': ('pmap', 'shard_map'),
}

Rule = tuple[Callable[[Any], Any], str]  # (what must hold, its description for error messages)


def _from(low: int, high: int) -> Rule:
  """A whole number in a range."""
  return lambda x: low <= x <= high, f'at least {low} and at most {high}'


def _above(low: float, high: float) -> Rule:
  """A number above `low` and up to `high`, also when rounded to float32."""
  return lambda x: in_float32(x) and low < x <= high, f'above {low} in float32 and at most {high:g}'


def _at_least_0(high: float) -> Rule:
  """0, or a positive number that float32 does not round to 0."""
  return lambda x: in_float32(x) and 0 <= x <= high, f'0, or at least {FLOAT32[0]:.2g} (float32) and at most {high:g}'


def _in_share(x: Any) -> bool:
  return in_float32(x) and bool(x >= 0 and np.float32(x) < 1)


_SHARE: Rule = (_in_share, 'in [0, 1) after rounding to float32')
_STEPS, _COUNT = 2**31 - 1, 10**6  # upper bounds of steps (int32) and of other counts
_RATE = 1e6  # upper bound of learning rates and weights

# The range of every number. Upper bounds are far above useful values: they turn hangs and crashes into error messages.
RULES: dict[str, Rule] = {
  'seed': (lambda x: 0 <= x < SEEDS, f'from 0 to {SEEDS - 1}'),
  'epochs': _from(1, _STEPS),
  'steps': _from(0, _STEPS),
  'batch_size': _from(2, 2**24),
  'views': _from(1, 64),
  'small_crops.number': _from(0, 64),
  'small_crops.size': _from(1, 4096),
  'small_crops.scale': (
    lambda s: len(s) == 2 and all(map(in_float32, s)) and 0 < s[0] <= s[1] <= 1,
    '0 < low <= high <= 1, such as (0.05, 0.14)',
  ),
  'ema': (_in_share, 'in [0, 1) after rounding to float32, such as 0.999, or 0 for no average'),
  'online_probe': _at_least_0(_RATE),
  'data.held_out': (_in_share, 'in [0, 1), such as 0.1, or 0 for a set with a test split'),
  'data.image_size': _from(1, 4096),
  'data.stored_size': _from(0, 4096),
  'data.tokens': _from(3, 2**16),
  'data.workers': _from(0, 256),
  'data.shuffle_window': _from(0, _STEPS),
  'optimizer.learning_rate': _above(0, _RATE),
  'optimizer.momentum': _SHARE,
  'optimizer.betas': (
    lambda b: len(b) == 2 and all(map(_in_share, b)),
    'two numbers in [0, 1) after rounding to float32, such as (0.9, 0.999)',
  ),
  'optimizer.weight_decay': _at_least_0(_RATE),
  'optimizer.warmup_epochs': _at_least_0(_STEPS),
  'optimizer.milestones': (
    lambda m: all(0 < x <= _STEPS for x in m) and len({*m}) == len(m) <= 1000,
    'different positive epochs, such as (160, 190)',
  ),
  'optimizer.decay': _above(0, _RATE),
  'optimizer.clip': _at_least_0(FLOAT32[1]),
  'parallel.devices': _from(0, _COUNT),
  'parallel.cpu_devices': _from(1, 256),
  'parallel.steps_per_call': _from(0, _STEPS),
  'parallel.processes': _from(1, _COUNT),
  'checkpoint.every_minutes': _above(0, _COUNT),
  'checkpoint.every_steps': _from(0, _STEPS),
  'checkpoint.keep': _from(1, _COUNT),
  'checkpoint.keep_every': _from(0, _STEPS),
  'log.every_steps': _from(1, _STEPS),
  'eval.every_epochs': _from(0, _STEPS),
  'eval.crop': (lambda x: 0.1 <= x <= 1, 'from 0.1 to 1: a fraction of the shorter side'),
  'eval.patches': _from(0, 16),
  'eval.patch': (lambda x: 0.1 <= x <= 1, 'from 0.1 to 1: a fraction of the side'),
  'eval.k': (
    lambda k: len(k) <= 100 and all(is_whole(x) and x >= 1 for x in k),
    'numbers of neighbors, such as (200,), or () for no kNN',
  ),
  'eval.temperature': _above(0, _RATE),
  'eval.batch_size': _from(1, _COUNT),
  'eval.seeds': (
    lambda s: 0 < len(s) <= 100 and all(is_whole(x) and 0 <= x < SEEDS for x in s),
    f'whole numbers from 0 to {SEEDS - 1}, such as (0,)',
  ),
  'eval.finetune_learning_rate': _above(0, _RATE),
  'eval.class_weights': (
    lambda w: all(in_float32(x) and 0 < x <= _RATE for x in w),
    'positive numbers, one per class, such as (1.0, 2.45), or () for no weights',
  ),
  'eval.views': _from(2, 64),
  'eval.view_images': _from(2, _STEPS),
  'eval.retrieval': _from(0, _STEPS),
}


def validate(config: ConfigDict, base: ConfigDict) -> None:
  """Raises a ValueError for an invalid key, type, value or choice, and if the views need too much memory."""
  _validate_keys(config, base, '')
  flat = flatten(config)
  value_of = lambda key: functools.reduce(lambda section, name: section[name], key.split('.'), config)
  for key, known in CHOICES.items():
    require_choice(key, value_of(key), known)
  for key, (holds, must_be) in RULES.items():
    require(key, value_of(key), holds, must_be)
  for key, value in flat.items():
    if not all(isinstance(x, str | int | float | None) for x in _leaves(value)):
      raise ValueError(f'{key} = {show(value)} must be a number, a string or a tuple of them, for config.json')
  named = lambda fork: not fork or re.fullmatch(r'.+@\d{1,10}', fork)
  require('fork', config.fork, named, "RUNDIR@STEP, such as runs/cifar10@3900, or '' for a run of its own")
  size = config.data.image_size
  stored = lambda pixels: pixels == 0 or pixels >= size
  require('data.stored_size', config.data.stored_size, stored, f'0 or at least data.image_size = {size}')
  train, test = config.data.train_split, config.data.test_split
  if config.data.held_out and train != test and 'auto' not in (train, test):
    raise ValueError(
      f'data.held_out = {config.data.held_out} has no effect, because data.train_split = {train!r} and '
      f'data.test_split = {test!r} differ: set it to 0, or use the same split for both'
    )
  _require_memory_of_views(config)


def memory() -> int:
  """The memory of this machine, in bytes."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def require_memory(what: str, needed: float, fix: str) -> None:
  """Raises a ValueError, '{what} needs ... GiB ...: {fix}', if `needed` bytes exceed the memory of this machine."""
  if needed > memory():
    raise ValueError(f'{what} needs {needed / 2**30:,.0f} GiB, and this machine has {memory() / 2**30:,.0f}: {fix}')


def _require_memory_of_views(config: ConfigDict) -> None:
  small = config.small_crops
  pixels = config.views * config.data.image_size**2 + small.number * small.size**2
  if config.data.source != 'text':
    needed = 12 * pixels * config.batch_size / config.parallel.processes  # three channels in float32
    what = f'batch_size = {config.batch_size} with views = {config.views} of {config.data.image_size} pixels'
    require_memory(what, needed, 'lower one of them')


def _leaves(value: Any) -> list[Any]:
  return [leaf for x in value for leaf in _leaves(x)] if isinstance(value, list | tuple) else [value]


def _validate_keys(config: ConfigDict, base: ConfigDict, prefix: str) -> None:
  for key in config:
    if key not in base:
      raise ValueError(f'config key {prefix + key!r} does not exist: {nearest(key, list(base))}')
  for key, default in base.items():
    if key not in config:
      raise ValueError(f'config key {prefix + key!r} is missing: inherit from configs/base.py')
    if prefix == '' and key in NAMED:
      require_keys(key, config[key])
      if key != 'augment_other' and 'name' not in config[key]:
        raise ValueError(f'{key} = {show(config[key])} must have a name, such as {show(default)}')
      require(f'{key}.name', config[key].get('name', ''), lambda name: isinstance(name, str), 'a string')
    elif isinstance(default, ConfigDict):
      if not isinstance(config[key], ConfigDict):
        raise ValueError(f'config key {prefix + key!r} = {show(config[key])} must be a section')
      _validate_keys(config[key], default, f'{prefix}{key}.')
    else:
      value = same_type(prefix + key, config[key], default)
      if value is not config[key]:  # converted, such as 1 in a config.json to 1.0
        with config.ignore_type():  # slow: it visits every key
          config[key] = value
