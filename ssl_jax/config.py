"""From a config file and flags to a valid config, before anything is compiled or loaded."""

import ast
import functools
import importlib.util
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.registry import nearest, plain, require, require_choice

SEEDS = 2**31  # jax makes a key from an int32

# Sections whose keys depend on what they name, which checks them.
NAMED = ('augment', 'augment_other', 'model', 'projector', 'method', 'loss', 'temperature', 'imbalance')

# Choices without a table of their own. Names of sources, optimizers and evaluations are checked where they are defined.
CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'data.on_device': ('auto', 'yes', 'no'),
  'parallel.map': ('pmap', 'shard_map'),
}

Rule = tuple[Callable[[Any], Any], str]  # what must hold, and the same in words


def _at_least(low: float) -> Rule:
  return lambda x: low <= x < math.inf, f'at least {low} and finite'


def _above(low: float) -> Rule:
  return lambda x: low < x < math.inf, f'above {low} and finite'


def _whole(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)


_SHARE: Rule = (lambda x: 0 <= x < 1, 'in [0, 1)')
RULES: dict[str, Rule] = {
  'seed': (lambda x: 0 <= x < SEEDS, f'from 0 to {SEEDS - 1}'),
  'epochs': _above(0),
  'steps': _at_least(0),
  'batch_size': _at_least(2),
  'views': _at_least(1),
  'small_crops.number': _at_least(0),
  'small_crops.size': _at_least(1),
  'small_crops.scale': (lambda s: len(s) == 2 and 0 < s[0] <= s[1] <= 1, '0 < low <= high <= 1, such as (0.05, 0.14)'),
  'ema': (_SHARE[0], 'in [0, 1), such as 0.999, or 0 for no average'),
  'online_probe': _at_least(0),
  'data.held_out': (_SHARE[0], 'in [0, 1), such as 0.1, or 0 for a set with a test split'),
  'data.image_size': _at_least(1),
  'data.stored_size': _at_least(0),
  'data.tokens': _at_least(3),
  'data.workers': _at_least(0),
  'optimizer.learning_rate': _above(0),
  'optimizer.momentum': _SHARE,
  'optimizer.betas': (
    lambda b: len(b) == 2 and all(0 <= x < 1 for x in b),
    'two numbers in [0, 1), such as (0.9, 0.999)',
  ),
  'optimizer.weight_decay': _at_least(0),
  'optimizer.warmup_epochs': _at_least(0),
  'optimizer.milestones': (
    lambda m: all(0 < x < math.inf for x in m) and len({*m}) == len(m),
    'different positive epochs, such as (160, 190)',
  ),
  'optimizer.decay': _above(0),
  'optimizer.clip': _at_least(0),
  'parallel.devices': _at_least(0),
  'parallel.cpu_devices': _at_least(1),
  'parallel.steps_per_call': _at_least(0),
  'parallel.processes': _at_least(1),
  'checkpoint.every_minutes': _above(0),
  'checkpoint.every_steps': _at_least(0),
  'checkpoint.keep': _at_least(1),
  'log.every_steps': _at_least(1),
  'eval.every_epochs': _at_least(0),
  'eval.crop': (lambda x: 0 < x <= 1, 'in (0, 1]: a share of the shorter side'),
  'eval.k': (lambda k: all(_whole(x) and x >= 1 for x in k), 'numbers of neighbors, such as (200,), or () for no kNN'),
  'eval.temperature': _above(0),
  'eval.batch_size': _at_least(1),
  'eval.seeds': (
    lambda s: s and all(_whole(x) and 0 <= x < SEEDS for x in s),
    f'whole numbers from 0 to {SEEDS - 1}, such as (0,)',
  ),
  'eval.views': _at_least(2),
  'eval.view_images': _at_least(2),
}

# Keys that may change when a run is resumed, because they do not change what it computes.
HARMLESS = (
  *('deterministic', 'data.path', 'data.workers', 'data.broken', 'model.remat', 'method.block'),
  *('parallel', 'checkpoint', 'log', 'eval'),
)

# Keys that are younger than some recorded runs, with what those runs did.
LATER = {
  'init': '',
  'deterministic': False,
  'data.held_out': 0.0,
  'data.stored_size': 0,
  'data.tokens': 32,
  'data.vocabulary': '',
  'optimizer.clip': 0.0,
  'eval.cap_k': False,
}
RENAMED = {'probe': 'online_probe'}  # top-level keys that had another name

# Keys that change neither what a run computes nor how it is evaluated.
IRRELEVANT = (
  *(key for key in HARMLESS if key != 'eval'),
  *(f'eval.{key}' for key in ('every_epochs', 'measures', 'at_start', 'at_end', 'batch_size', 'data.path')),
  *('eval.sts', 'eval.transfer'),
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
  """A recorded config in today's words: keys and names that changed since, and keys that came later."""

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
  config = ConfigDict(tuples(upgrade(saved)))
  for section in (key for key in HARMLESS if isinstance(base.get(key), ConfigDict) and key in config):
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
  if named and last == 'name':
    if value != section.get('name'):
      for stale in list(section):
        del section[stale]
    section.name = value
    return
  if last not in section and not named:
    raise ValueError(f'config key {key!r} = {value!r} does not exist: {_elsewhere(config, last, section)}')
  if named:
    if last in section:
      del section[last]  # its type may change: a number, or the dict of a schedule
    section[last] = value
    return
  if isinstance(section[last], ConfigDict):
    if not isinstance(value, Mapping):
      raise ValueError(f'config key {key!r} = {value!r} is a section: set one of {", ".join(section[last])}')
    if last in NAMED:
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
  except (ValueError, SyntaxError):
    return {'true': True, 'false': False}.get(text.lower(), text)


def _same_type(key: str, value: Any, default: Any) -> Any:
  """`value` as the type of `default`, or a ValueError."""
  if isinstance(default, bool) or isinstance(value, bool):
    fits = isinstance(default, bool) and isinstance(value, bool)
  elif isinstance(default, float):
    fits = isinstance(value, int | float)
    value = float(value) if fits else value
  elif isinstance(default, int):
    fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    value = int(value) if fits else value
  elif isinstance(default, tuple):
    value = tuple(value) if isinstance(value, tuple | list) else (value,)
    fits = all(isinstance(v, int | float) for v in value)
  else:
    fits = isinstance(value, type(default))
  if not fits:
    raise ValueError(f'{key} = {value!r} must be of type {type(default).__name__}, such as {default!r}')
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
      raise ValueError(f'{key} = {value!r} must be a number, a text or a tuple of them, which config.json can hold')
  size = config.data.image_size
  stored = lambda pixels: pixels == 0 or pixels >= size
  require('data.stored_size', config.data.stored_size, stored, f'0 or at least data.image_size = {size}')
  train, test = config.data.train_split, config.data.test_split
  if config.data.held_out and train != test and 'auto' not in (train, test):
    raise ValueError(
      f'data.held_out = {config.data.held_out} has no effect, because data.train_split = {train!r} and '
      f'data.test_split = {test!r} differ: set it to 0, or name one split twice'
    )


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
      if key != 'augment_other' and 'name' not in config[key]:
        raise ValueError(f'{key} = {dict(config[key])!r} must have a name, such as {dict(default)!r}')
    elif isinstance(default, ConfigDict):
      _validate_keys(config[key], default, f'{prefix}{key}.')
    else:
      config[key] = _same_type(prefix + key, config[key], default)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
  """The first key in which two runs differ in more than harmless ways, as one line; None if they are the same run."""
  before, after = flatten(upgrade(old)), flatten(upgrade(new))
  for key in sorted(before.keys() | after.keys()):
    if not _within(key, HARMLESS) and before.get(key) != after.get(key):
      return f'{key} = {after.get(key)!r} here, {before.get(key)!r} there'
  return None
