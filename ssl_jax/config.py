"""From a config file and flags to a config that is known to be sound, before anything is compiled or loaded."""

import ast
import importlib.util
import math
import pathlib
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from ssl_jax.registry import nearest

SEEDS = 2**31  # jax makes a key of an int32

# Sections whose keys depend on their name; whatever they name checks them.
NAMED = ('augment', 'augment_other', 'model', 'projector', 'method', 'loss', 'temperature', 'imbalance')

CHOICES = {
  'dtype': ('bfloat16', 'float32'),
  'data.source': ('tfds', 'arrays', 'folder', 'embedded', 'text'),
  'data.classes': ('', 'imagenet100'),
  'eval.data.source': ('', 'tfds', 'arrays', 'folder', 'embedded'),
  'data.broken': ('error', 'skip'),
  'data.on_device': ('auto', 'yes', 'no'),
  'optimizer.name': ('sgd', 'lars', 'adamw'),
  'optimizer.scaling': ('none', 'linear', 'sqrt'),
  'optimizer.schedule': ('cosine', 'linear', 'step', 'constant'),
  'parallel.map': ('pmap', 'shard_map'),
  'eval.features': ('backbone', 'projector'),
  'eval.train_images': ('kept', 'all'),
  'eval.vote': ('cosine', 'distance', 'majority'),
  'eval.finetune': ('', 'all', '10%', '1%', '5-shot', 'linear', 'linear 10%', 'linear 1%', 'linear 5-shot'),
  'eval.linear': (
    '',
    'logistic',
    'ridge',
    'behaviour',
    'cacr_small',
    'cacr_small_as_is',
    'cacr_large',
    'supervised_cifar',
    'dystress_imagenet',
    'imagenet_lars',
  ),
}

# (least, whether that least value itself is allowed)
LEAST = {
  'seed': (0, True),
  'epochs': (0, False),
  'steps': (0, True),
  'batch_size': (2, True),
  'views': (1, True),
  'small_crops.number': (0, True),
  'small_crops.size': (1, True),
  'ema': (0, True),
  'probe': (0, True),
  'data.image_size': (1, True),
  'data.stored_size': (0, True),
  'data.tokens': (3, True),
  'data.workers': (0, True),
  'optimizer.learning_rate': (0, False),
  'optimizer.momentum': (0, True),
  'optimizer.weight_decay': (0, True),
  'optimizer.warmup_epochs': (0, True),
  'optimizer.decay': (0, False),
  'optimizer.clip': (0, True),
  'parallel.devices': (0, True),
  'parallel.cpu_devices': (1, True),
  'parallel.steps_per_call': (0, True),
  'parallel.processes': (1, True),
  'checkpoint.every_minutes': (0, False),
  'checkpoint.every_steps': (0, True),
  'checkpoint.keep': (1, True),
  'log.every_steps': (1, True),
  'eval.every_epochs': (0, True),
  'eval.crop': (0, False),
  'eval.temperature': (0, False),
  'eval.batch_size': (1, True),
  'eval.views': (2, True),
  'eval.view_images': (2, True),
}

# Keys that may change between the parts of a resumed run, since they do not change what it computes.
HARMLESS = (
  *('deterministic', 'data.path', 'data.workers', 'data.broken', 'model.remat', 'method.block'),
  *('parallel', 'checkpoint', 'log', 'eval'),
)

# Keys that are younger than runs which may go on, with what those runs did.
LATER = {
  'init': '',
  'deterministic': False,
  'data.stored_size': 0,
  'data.tokens': 32,
  'data.vocabulary': '',
  'optimizer.clip': 0.0,
}

# Keys that change neither what a run computes nor how it is judged.
IRRELEVANT = (
  *(key for key in HARMLESS if key != 'eval'),
  *(f'eval.{key}' for key in ('every_epochs', 'measures', 'at_start', 'at_end', 'batch_size', 'data.path', 'sts')),
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
    raise ValueError(f'--config={file!r} is no Python file: give one like configs/quickstart.py')
  spec = importlib.util.spec_from_file_location('config_file', file)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    config = module.get_config(arg)
  except (TypeError, AttributeError, NameError, SyntaxError, ImportError, LookupError) as error:
    raise ValueError(f'--config={file!r} makes no config ({type(error).__name__}: {error})') from error
  if not isinstance(config, ConfigDict):
    raise ValueError(f'--config={file!r} makes no config: get_config returns {config!r}')
  return _overridden(config, overrides)


def restore(saved: Mapping, base: ConfigDict, overrides: Sequence[str] = ()) -> ConfigDict:
  """The config of a finished run, from its config.json; keys that came later are of LATER, harmless ones of `base`."""
  tuples = lambda x: (
    {k: tuples(v) for k, v in x.items()} if isinstance(x, Mapping) else tuple(x) if isinstance(x, list) else x
  )
  config = ConfigDict(tuples(saved))
  for key, value in LATER.items():
    section, _, last = key.rpartition('.')
    part = config[section] if section else config
    part[last] = part.get(last, value)
  for section in (key for key in HARMLESS if isinstance(base.get(key), ConfigDict) and key in config):
    config[section] = ConfigDict({**base[section].to_dict(), **config[section].to_dict()})
  return _overridden(config, overrides)


def _overridden(config, overrides):
  # A section's new name comes before its new parameters, in whatever order they were typed.
  pairs = [text.partition('=')[::2] for text in overrides]
  for key, value in sorted(pairs, key=lambda pair: not pair[0].endswith('.name')):
    override(config, key, value)
  given = dict(pairs)
  if 'epochs' in given and 'steps' not in given and config.get('steps'):
    raise ValueError(f'epochs = {config.epochs} changes nothing, since steps = {config.steps} decides: set steps=0 too')
  return config


def override(config: ConfigDict, key: str, value) -> None:
  """Sets one dotted key; text is read as a Python literal where it is one and the key does not hold text."""
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
    raise ValueError(f'config key {key!r} = {value!r} does not exist: {nearest(last, list(section))}')
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


def _literal(text: str):
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return {'true': True, 'false': False}.get(text.lower(), text)


def _same_type(key, value, default):
  """`value` as the type of `default`, or an error."""
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
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = list(value) if isinstance(value, tuple) else value
  return flat


def relevant(config: Mapping, prefix: str = '') -> dict:
  """`flatten`, without the keys that change neither what a run computes nor how it is judged."""
  return {key: value for key, value in flatten(config, prefix).items() if not _within(key, IRRELEVANT)}


def _within(key: str, sections: Sequence[str]) -> bool:
  """Whether a dotted key is one of these, or lies in one of them."""
  return any(key == section or key.startswith(section + '.') for section in sections)


def validate(config: ConfigDict, base: ConfigDict) -> None:
  """Refuses a config with a key that `base` has not, a value of another type, out of range or of unknown name."""
  _validate_keys(config, base, '')
  flat = flatten(config)
  for key, known in CHOICES.items():
    if flat[key] not in known:
      raise ValueError(f'{key} = {flat[key]!r} does not exist: {nearest(str(flat[key]), known)}')
  for key, (least, inclusive) in LEAST.items():
    if not (flat[key] >= least if inclusive else flat[key] > least) or not math.isfinite(flat[key]):
      raise ValueError(f'{key} = {flat[key]!r} must be {"at least" if inclusive else "above"} {least}')
  for key, value in flat.items():
    if not all(isinstance(x, str | int | float | None) for x in _leaves(value)):
      raise ValueError(
        f'{key} = {value!r} is a {type(value).__name__}, which config.json cannot hold: give a plain one'
      )
  milestones = config.optimizer.milestones
  if any(not isinstance(m, int | float) or m <= 0 for m in milestones) or len({*milestones}) < len(milestones):
    raise ValueError(f'optimizer.milestones = {milestones!r} must be different epochs above 0, such as (160, 190)')
  scale = config.small_crops.scale
  if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
    raise ValueError(f'small_crops.scale = {scale!r} must be 0 < low <= high <= 1, such as (0.05, 0.14)')
  if config.seed >= SEEDS:
    raise ValueError(f'seed = {config.seed!r} must be below {SEEDS}')
  betas = config.optimizer.betas
  if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
    raise ValueError(f'optimizer.betas = {betas!r} must be two numbers in [0, 1), such as (0.9, 0.999)')
  if config.optimizer.momentum >= 1:
    raise ValueError(f'optimizer.momentum = {config.optimizer.momentum!r} must be below 1, such as 0.9')
  if config.ema >= 1:
    raise ValueError(f'ema = {config.ema!r} must be below 1, such as 0.999, or 0 for no average')
  if not config.eval.seeds or any(not isinstance(x, int) or not 0 <= x < SEEDS for x in config.eval.seeds):
    raise ValueError(f'eval.seeds = {config.eval.seeds!r} must be whole numbers from 0 to {SEEDS - 1}, such as (0,)')
  if 0 < config.data.stored_size < config.data.image_size:
    size = config.data.image_size
    raise ValueError(f'data.stored_size = {config.data.stored_size!r} must be 0 or at least data.image_size = {size}')
  if config.eval.crop > 1:
    raise ValueError(f'eval.crop = {config.eval.crop!r} must be a share of the image, at most 1')
  if any(not isinstance(k, int) or k < 1 for k in config.eval.k):
    raise ValueError(f'eval.k = {config.eval.k!r} must be numbers of neighbours, such as (200,), or () for no kNN')


def _leaves(value) -> list:
  return [leaf for x in value for leaf in _leaves(x)] if isinstance(value, list | tuple) else [value]


def _validate_keys(config, base, prefix):
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


def difference(old: Mapping, new: Mapping) -> str | None:
  """The first key in which two runs differ in more than harmless ways, as one line; None if they are the same run."""
  old, new = LATER | flatten(old), LATER | flatten(new)
  for key in sorted(old.keys() | new.keys()):
    if not _within(key, HARMLESS) and old.get(key) != new.get(key):
      return f'{key} = {new.get(key)!r} here, {old.get(key)!r} there'
  return None
