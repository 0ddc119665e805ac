"""Loads a config from a file and flags."""

import ast
import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.registry import FLOAT32, SYNONYMS, is_mapping, nearest, show

# Sections whose keys depend on their `name`. The named function or class checks the keys.
NAMED = ('augment', 'augment_other', 'model', 'projector', 'method', 'loss', 'temperature', 'imbalance')


def load(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
  """The config of `FILE.py[:options]`, with `key=value` overrides, not yet validated."""
  file, variants, pairs = _split(path)
  if not pathlib.Path(file).is_file():
    folder = pathlib.Path(file) if pathlib.Path(file).is_dir() else pathlib.Path(file).parent
    places = dict.fromkeys([folder, pathlib.Path('configs')])
    known = [str(p) for place in places for p in sorted(place.glob('*.py')) if p.stem not in ('__init__', 'main')]
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
    config = module.get_config(variants)
  except (TypeError, AttributeError, NameError, SyntaxError, ImportError, LookupError) as error:
    raise ValueError(f'--config={file!r} cannot be loaded ({type(error).__name__}: {error})') from error
  if not isinstance(config, ConfigDict):
    raise ValueError(f'--config={file!r} is not a config: get_config returned a {type(config).__name__}')
  config = overridden(config, [*pairs, *overrides])
  if not config.get('data', {}).get('name', '?'):
    config.data.name = set_name(config.data.path)
  return config


def set_name(path: str) -> str:
  """The default name of a dataset: the name of its folder.

  >>> set_name('/data/birds/')
  'birds'
  """
  return pathlib.Path(path).expanduser().absolute().name if path else ''


def split_options(arg: str) -> list[str]:
  """Splits the options after the colon of --config at commas, except commas inside brackets.

  >>> split_options('dystress,eval.k=(1,2),seed=1')
  ['dystress', 'eval.k=(1,2)', 'seed=1']
  """
  options, depth = [''], 0
  for character in arg:
    depth += (character in '([{') - (character in ')]}')
    if character == ',' and depth <= 0:
      options.append('')
    else:
      options[-1] += character
  return [option for option in options if option]


def _split(path: str) -> tuple[str, str, list[str]]:
  """The file, the variants and the `key=value` pairs of `FILE.py[:options]`."""
  file, _, arg = path.partition(':')
  options = split_options(arg)
  return file, ','.join(x for x in options if '=' not in x), [x for x in options if '=' in x]


def changed(path: str, overrides: Sequence[str] = ()) -> tuple[set[str], ConfigDict]:
  """The keys that the command line sets, and the config of the file and its variants without these changes."""
  file, variants, pairs = _split(path)
  return {text.partition('=')[0] for text in (*pairs, *overrides)}, load(f'{file}:{variants}')


def overridden(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
  """The config with `key=value` overrides. The name of a section is set before its parameters."""
  pairs = [text.partition('=')[::2] for text in overrides]
  for key, value in sorted(pairs, key=lambda pair: not pair[0].endswith('.name')):
    override(config, key, value)
  given = dict(pairs)
  if 'epochs' in given and 'steps' not in given and config.get('steps'):
    raise ValueError(
      f'epochs = {config.epochs} has no effect, because steps = {config.steps} takes precedence: set steps=0 as well'
    )
  return config


def override(config: ConfigDict, key: str, value: Any) -> None:
  """Sets one dotted key. A string is parsed as a Python literal if possible, unless the key holds a string."""
  *path, last = key.split('.')
  section = config
  for depth, part in enumerate(path):
    if part not in section or not isinstance(section[part], ConfigDict):
      known = [k for k in section if isinstance(section[k], ConfigDict)]
      fix = nearest('.'.join(path[: depth + 1]), known)
      if depth and depth == len(path) - 1 and path[0] in NAMED:
        fix = f'set {".".join(path)}="{ {last: _literal(value) if isinstance(value, str) else value} }"'
      raise ValueError(f'config key {key!r} does not exist: {fix}')
    section = section[part]
  named = bool(path) and path[0] in NAMED
  if isinstance(value, str) and not isinstance(section.get(last), str):
    value = _literal(value)
  require_keys(key, value)
  if named and last == 'name':
    if value != section.get('name'):
      for stale in list(section):
        del section[stale]
    section.name = value
    return
  if named:
    if last in section:
      del section[last]  # the type may change, such as from a number to the dict of a schedule
    section[last] = value
    return
  if last not in section:
    raise ValueError(f'config key {key!r} = {show(value)} does not exist: {_elsewhere(config, last, section)}')
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
  section[last] = same_type(key, value, section[last])


def _elsewhere(config: ConfigDict, last: str, section: ConfigDict) -> str:
  """A hint for a key that does not exist in its section: it may be in another section."""
  meant = SYNONYMS.get(last, last)
  found = [key for key in flatten(config) if key.rpartition('.')[2] == meant]
  if len(found) == 1:
    return f'did you mean {found[0]!r}?'
  return f'give one of {", ".join(found)}' if found else nearest(last, list(section))


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # such as '{[]: 1}' and '((((...'
    return {'true': True, 'false': False}.get(text.lower(), text)


def require_keys(key: str, value: Any) -> None:
  """Raises a ValueError for a mapping that config.json and dotted keys cannot represent."""
  if is_mapping(value):
    for name, inner in value.items():
      if not isinstance(name, str) or '.' in name:
        raise ValueError(f'{key} = {show(value)} must have names without dots as its keys, not {show(name)}')
      require_keys(f'{key}.{name}', inner)


def same_type(key: str, value: Any, default: Any) -> Any:
  """Converts `value` to the type of `default`; raises a ValueError if the types do not match."""
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
  """Flattens a config, including nested dicts, to {'data.name': 'cifar10', ...}; tuples become lists."""
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = list(value) if isinstance(value, tuple) else value
  return flat
