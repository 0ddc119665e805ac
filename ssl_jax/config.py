"""From a config file and flags to a valid config, before anything is compiled or loaded."""

import ast
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from ssl_jax.registry import FLOAT32, in_float32, is_mapping, is_whole, nearest, plain, require, require_choice, show

SEEDS = 2**31  # jax makes a key from an int32

# Sections whose keys depend on their `name`. What they name checks them.
NAMED = ('augment', 'augment_other', 'model', 'projector', 'method', 'loss', 'temperature', 'imbalance')

# Choices without a table of their own. Names of sources, optimizers and evaluations are checked where they are defined.
CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'data.on_device': ('auto', 'yes', 'no'),
  'parallel.map': ('pmap', 'shard_map'),
}

Rule = tuple[Callable[[Any], Any], str]  # what must hold, and the same in words


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


_SHARE: Rule = (_in_share, 'in [0, 1), also in float32')
_STEPS, _COUNT = 2**31 - 1, 10**6  # steps are int32; also a bound for other counts
_RATE = 1e6  # no learning rate or weight is larger

# The range of every number. An upper bound is far above what is useful: it turns a hang or a crash into a message.
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
  'ema': (_in_share, 'in [0, 1), also in float32, such as 0.999, or 0 for no average'),
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
    'two numbers in [0, 1), also in float32, such as (0.9, 0.999)',
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
  'eval.crop': (lambda x: 0.1 <= x <= 1, 'from 0.1 to 1: a share of the shorter side'),
  'eval.patches': _from(0, 16),
  'eval.patch': (lambda x: 0.1 <= x <= 1, 'from 0.1 to 1: a share of the side'),
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
    'positive numbers, one per class, such as (1.0, 2.45), or () for weights inverse to the size of a class',
  ),
  'eval.views': _from(2, 64),
  'eval.view_images': _from(2, _STEPS),
  'eval.retrieval': _from(0, _STEPS),
}

# Keys that may change when a run is resumed, because they do not change what it computes.
HARMLESS = (
  *('deterministic', 'data.path', 'data.workers', 'data.broken', 'data.cache'),
  *('model.remat', 'method.block', 'method.ring'),
  *('parallel', 'checkpoint', 'log', 'eval'),
)

# Keys that were added later, with the values that older runs used.
LATER = {
  'init': '',
  'fork': '',
  'deterministic': False,
  'data.held_out': 0.0,
  'data.stored_size': 0,
  'data.cache': '',
  'data.tokens': 32,
  'data.vocabulary': '',
  'data.columns': '',
  'data.shuffle_window': 0,
  'optimizer.clip': 0.0,
  'eval.cap_k': False,
  'eval.flip': False,
  'eval.patches': 0,
  'eval.patch': 0.75,
  'eval.prompts': '',
  'eval.class_names': '',
  'eval.retrieval': 5000,
  'optimizer.fixed_predictor': False,
  'eval.linear_during': False,
}
RENAMED = {'probe': 'online_probe'}  # top-level keys that had another name

# Keys that change neither what a run computes nor how it is evaluated.
IRRELEVANT = (
  *(key for key in HARMLESS if key != 'eval'),
  *(f'eval.{key}' for key in ('every_epochs', 'measures', 'at_start', 'at_end', 'batch_size', 'data.path')),
  *('eval.sts', 'eval.transfer', 'eval.linear_during'),
)


def load(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
  """The config of `FILE.py[:options]`, with `key=value` overrides. Not validated yet."""
  file, _, arg = path.partition(':')
  if not pathlib.Path(file).is_file():
    folder = pathlib.Path(file) if pathlib.Path(file).is_dir() else pathlib.Path(file).parent
    known = [str(folder / p.name) for p in sorted(folder.glob('*.py')) if p.stem != '__init__']
    raise ValueError(
      f'--config={file!r} is not a file: {nearest(file, known) if known else "give a configs/*.py file"}'
    )
  if not file.endswith('.py'):
    raise ValueError(f'--config={file!r} is not a Python file: give one like configs/quickstart.py')
  spec = importlib.util.spec_from_file_location('config_file', file)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    config = module.get_config(arg)
  except (TypeError, AttributeError, NameError, SyntaxError, ImportError, LookupError) as error:
    raise ValueError(f'--config={file!r} cannot be loaded ({type(error).__name__}: {error})') from error
  if not isinstance(config, ConfigDict):
    raise ValueError(f'--config={file!r} is not a config: get_config returned a {type(config).__name__}')
  config = _overridden(config, overrides)
  if not config.get('data', {}).get('name', '?'):
    config.data.name = set_name(config.data.path)
  return config


def set_name(path: str) -> str:
  """The name of a set without one: that of its folder.

  >>> set_name('/data/birds/')
  'birds'
  """
  return pathlib.Path(path).expanduser().absolute().name if path else ''


def split_options(arg: str) -> list[str]:
  """The options after the colon of --config; a comma inside brackets does not separate them.

  >>> split_options('dystress,eval.k=(1,2),seed=1')
  ['dystress', 'eval.k=(1,2)', 'seed=1']
  """
  return [option for option in re.split(r',(?![^(\[{]*[)\]}])', arg) if option]


def changed(path: str, overrides: Sequence[str] = ()) -> tuple[set[str], ConfigDict]:
  """The keys that the command line sets, and the config of the file and its named options without these changes."""
  file, _, arg = path.partition(':')
  options = split_options(arg)
  keys = {text.partition('=')[0] for text in (*options, *overrides) if '=' in text}
  return keys, load(f'{file}:{",".join(option for option in options if "=" not in option)}')


def upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
  """A recorded config with today's keys and names, and with the keys that were added since."""

  def named(value: Any) -> Any:
    if isinstance(value, Mapping):
      return {key: named(inner) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith('supervised_'):  # Lee 2025, now named after its loss
      return value.replace('supervised_', 'balanced_', 1)
    return value

  config = {RENAMED.get(key, key): named(value) for key, value in plain(saved).items()}
  for key, value in LATER.items():
    section, _, last = key.rpartition('.')
    if isinstance(part := config.get(section) if section else config, dict):
      part.setdefault(last, value)
  return config


def restore(saved: Mapping[str, Any], base: ConfigDict, overrides: Sequence[str] = ()) -> ConfigDict:
  """The config of a recorded run, from its config.json; harmless keys that it lacks are those of `base`."""
  tuples: Callable[[Any], Any] = lambda x: (
    {k: tuples(v) for k, v in x.items()} if isinstance(x, Mapping) else tuple(x) if isinstance(x, list) else x
  )
  try:
    config = ConfigDict(tuples(upgrade(saved)))
  except ValueError as error:  # a key with a dot
    raise ValueError(f'config.json cannot be read ({error}): fix it, or remove it') from error
  for section in (key for key in HARMLESS if all(isinstance(c.get(key), ConfigDict) for c in (base, config))):
    config[section] = ConfigDict({**base[section].to_dict(), **config[section].to_dict()})
  return _overridden(config, overrides)


def _overridden(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
  # A section's new name comes before its new parameters, in whatever order they were typed.
  pairs = [text.partition('=')[::2] for text in overrides]
  for key, value in sorted(pairs, key=lambda pair: not pair[0].endswith('.name')):
    override(config, key, value)
  given = dict(pairs)
  if 'epochs' in given and 'steps' not in given and config.get('steps'):
    raise ValueError(
      f'epochs = {config.epochs} has no effect, because steps = {config.steps} decides: set steps=0 as well'
    )
  return config


def override(config: ConfigDict, key: str, value: Any) -> None:
  """Sets one dotted key; text is read as a Python literal if it is one, unless the key holds text."""
  *path, last = key.split('.')
  section = config
  for depth, part in enumerate(path):
    if part not in section or not isinstance(section[part], ConfigDict):
      known = [k for k in section if isinstance(section[k], ConfigDict)]
      raise ValueError(f'config key {key!r} does not exist: {nearest(".".join(path[: depth + 1]), known)}')
    section = section[part]
  named = bool(path) and path[0] in NAMED
  if isinstance(value, str) and not isinstance(section.get(last), str):
    value = _literal(value)
  _require_keys(key, value)
  if named and last == 'name':
    if value != section.get('name'):
      for stale in list(section):
        del section[stale]
    section.name = value
    return
  if last not in section and not named:
    raise ValueError(f'config key {key!r} = {show(value)} does not exist: {_elsewhere(config, last, section)}')
  if named:
    if last in section:
      del section[last]  # its type may change: a number, or the dict of a schedule
    section[last] = value
    return
  if isinstance(section[last], ConfigDict):
    if not is_mapping(value):
      known = ', '.join(section[last]) or "its keys, such as {'flip': 0.5}"
      raise ValueError(f'config key {key!r} = {show(value)} is a section: set one of {known}')
    if key in NAMED:
      config[key] = ConfigDict(dict(value))
    else:
      for name, inner in value.items():
        override(config, f'{key}.{name}', inner)
    return
  section[last] = _same_type(key, value, section[last])


def _elsewhere(config: ConfigDict, last: str, section: ConfigDict) -> str:
  """How to fix a key that its section lacks: it may be in another one."""
  found = [key for key in flatten(config) if key.endswith(f'.{last}')]
  if len(found) == 1:
    return f'did you mean {found[0]!r}?'
  return f'give one of {", ".join(found)}' if found else nearest(last, list(section))


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as for '{[]: 1}' and '((((...'
    return {'true': True, 'false': False}.get(text.lower(), text)


def _require_keys(key: str, value: Any) -> None:
  """Raises a ValueError for a mapping that config.json and dotted keys cannot hold."""
  if is_mapping(value):
    for name, inner in value.items():
      if not isinstance(name, str) or '.' in name:
        raise ValueError(f'{key} = {show(value)} must have names without dots as its keys, not {show(name)}')
      _require_keys(f'{key}.{name}', inner)


def _same_type(key: str, value: Any, default: Any) -> Any:
  """`value` as the type of `default`, or a ValueError."""
  if isinstance(default, bool) or isinstance(value, bool):
    fits = isinstance(default, bool) and isinstance(value, bool)
  elif isinstance(default, float):
    fits = isinstance(value, float) or (isinstance(value, int) and abs(value) <= FLOAT32[1])
    value = float(value) if fits else value
  elif isinstance(default, int):
    fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    value = int(value) if fits else value
  elif isinstance(default, tuple):
    value = tuple(value) if isinstance(value, tuple | list) else (value,)
    fits = all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
  else:
    fits = isinstance(value, type(default))
  if not fits:
    raise ValueError(f'{key} = {show(value)} must be of type {type(default).__name__}, such as {default!r}')
  return value


def flatten(config: Mapping, prefix: str = '') -> dict:
  """{'data.name': 'cifar10', ...}; a named section's dicts are flattened too."""
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = list(value) if isinstance(value, tuple) else value
  return flat


def relevant(config: Mapping, prefix: str = '') -> dict:
  """`flatten`, without the keys that change neither what a run computes nor how it is evaluated."""
  return {key: value for key, value in flatten(config, prefix).items() if not _within(key, IRRELEVANT)}


def _within(key: str, sections: Sequence[str]) -> bool:
  """Whether a dotted key is one of these sections, or inside one."""
  return any(key == section or key.startswith(section + '.') for section in sections)


def validate(config: ConfigDict, base: ConfigDict) -> None:
  """Raises a ValueError for an unknown key, a value of another type or out of range, or an unknown choice."""
  _validate_keys(config, base, '')
  flat = flatten(config)
  value_of = lambda key: functools.reduce(lambda section, name: section[name], key.split('.'), config)
  for key, known in CHOICES.items():
    require_choice(key, value_of(key), known)
  for key, (holds, must_be) in RULES.items():
    require(key, value_of(key), holds, must_be)
  for key, value in flat.items():
    if not all(isinstance(x, str | int | float | None) for x in _leaves(value)):
      raise ValueError(f'{key} = {show(value)} must be a number, a text or a tuple of them, which config.json can hold')
  named = lambda fork: not fork or re.fullmatch(r'.+@\d{1,10}', fork)
  require('fork', config.fork, named, "RUNDIR@STEP, such as runs/cifar10@3900, or '' for a run of its own")
  size = config.data.image_size
  stored = lambda pixels: pixels == 0 or pixels >= size
  require('data.stored_size', config.data.stored_size, stored, f'0 or at least data.image_size = {size}')
  train, test = config.data.train_split, config.data.test_split
  if config.data.held_out and train != test and 'auto' not in (train, test):
    raise ValueError(
      f'data.held_out = {config.data.held_out} has no effect, because data.train_split = {train!r} and '
      f'data.test_split = {test!r} differ: set it to 0, or name one split twice'
    )
  _require_memory_of_views(config)


def memory() -> int:
  """Bytes of memory of this machine."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def require_memory(what: str, needed: float, fix: str) -> None:
  """Raises a ValueError, '{what} needs ... GiB ...: {fix}', where that is more than this machine has."""
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
      _require_keys(key, config[key])
      if key != 'augment_other' and 'name' not in config[key]:
        raise ValueError(f'{key} = {show(config[key])} must have a name, such as {show(default)}')
      require(f'{key}.name', config[key].get('name', ''), lambda name: isinstance(name, str), 'a text')
    elif isinstance(default, ConfigDict):
      if not isinstance(config[key], ConfigDict):
        raise ValueError(f'config key {prefix + key!r} = {show(config[key])} must be a section')
      _validate_keys(config[key], default, f'{prefix}{key}.')
    else:
      value = _same_type(prefix + key, config[key], default)
      if value is not config[key]:  # 1 of a config.json is 1.0 here
        with config.ignore_type():  # slow: it visits every key
          config[key] = value


def difference(old: Mapping[str, Any], new: Mapping[str, Any], among: Sequence[str] = ()) -> str | None:
  """The first key in which two runs differ in more than harmless ways, as one line; None if they are the same run.

  With `among`, only these keys and sections are compared.
  """
  before, after = flatten(upgrade(old)), flatten(upgrade(new))
  for key in sorted(before.keys() | after.keys()):
    if not _within(key, HARMLESS) and (not among or _within(key, among)) and before.get(key) != after.get(key):
      return f'{key} = {show(after.get(key))} here, {show(before.get(key))} there'
  return None
