"""Random configs: each must end in a valid `Run` or in one line that says what is wrong.

    python -m tests.fuzz --cases=10000 --seed=0

The space is read from configs/base.py and from the tables that configs name, so a new key, encoder, head, method, loss,
temperature, preset or rule takes part without a change here. Nothing is compiled: a case ends with `builder.build` on
a few generated images. A case that fails is printed with its overrides, and is made again by its number:

    python -m tests.fuzz --cases=1 --seed=0 --first=4711
"""

import argparse
import collections
import inspect
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from configs import base
from ssl_jax import config, losses, methods, models, temperature
from ssl_jax.data import augment, imbalance
from ssl_jax.evals import settings
from ssl_jax.models import heads
from ssl_jax.registry import arguments
from ssl_jax.run import builder, optimizers

SECONDS = 120  # of one case, which takes less than one second if nothing hangs
SIZE = 16  # pixels of the images: enough for every encoder

# What each named section may name.
TABLES: dict[str, dict[str, Callable]] = {
  'model': models.ENCODERS,
  'projector': heads.HEADS,
  'method': methods.METHODS,
  'loss': {name: loss for method in methods.METHODS.values() for name, loss in method.accepts.items()},
  'temperature': temperature.OF_SIMILARITY | temperature.OF_STEP | {'none': lambda: None},
  'imbalance': imbalance.RULES,
}
CHOICES = {
  **config.CHOICES,
  **{f'eval.{key}': tuple(known) for key, known in settings.CHOICES.items()},
  'optimizer.name': tuple(optimizers.OPTIMIZERS),
  'optimizer.scaling': tuple(optimizers.SCALINGS),
  'optimizer.schedule': tuple(optimizers.SCHEDULES),
  'data.broken': ('error', 'skip'),
}
SLOW = ('resnet50', 'resnet101', 'vit_s16', 'vit_b16')  # traced for seconds: chosen rarely

NUMBERS = (0, 1, 2, 3, 5, 7, 8, 16, 32, 64, 100, 1000, -1, 2**31 - 1, 2**31, 2**63, 10**20, 10**400)
REALS = (0.0, 0.05, 0.1, 0.5, 0.9, 0.999, 1.0, 1.5, 2.0, 100.0, -0.1, -1.0, 1e-6, 1e-30, 1e-45, 1e-300, 1e30, 1e300)
EXTREME = (float('inf'), float('-inf'), float('nan'), 0.9999999999999, 5e-324, 1.7e308)
ODD: tuple[Any, ...] = (
  *('', ' ', 'none', 'yes', 'a\nb', '\x00', '/dev/zero', 'ü', '((((', '{', 'x' * 1000),
  *(None, True, False, (), (1,), (1, 2), (0.1, 0.2), (True,), ((1, 2), 3), ('a',), [], [1], {}, {'a': 1}, {1: 2}),
  *({'name': 'cosine'}, {'name': []}, {'name': 'learnable'}, {'name': 'linear_schedule', 'start': 0.1, 'end': 0.2}),
)


def images(folder: pathlib.Path) -> str:
  """A file of 48 training and 16 test images of four classes."""
  file = folder / 'images.npz'
  rng = np.random.default_rng(0)
  train, test = (rng.integers(0, 256, (n, SIZE, SIZE, 3), np.uint8) for n in (48, 16))
  np.savez(file, train_images=train, train_labels=np.arange(48) % 4, test_images=test, test_labels=np.arange(16) % 4)
  return str(file)


def sentences(folder: pathlib.Path) -> str:
  """A file of 48 sentences."""
  file = folder / 'sentences.txt'
  file.write_text(''.join(f'a sentence with the number {n}\n' for n in range(48)))
  return str(file)


def start(folder: pathlib.Path, of_text: bool = False) -> Any:
  """The config that cases change: a tiny run on images or on sentences."""
  chosen = base.get_config()
  tiny: dict[str, Any] = {
    'data': dict(source='arrays', name='tiny', path=str(folder / 'images.npz'), image_size=SIZE),
    'model': dict(name='resnet_tiny', width=8, stage_sizes=(1,)),
    'projector': dict(name='simclr', features=(8, 8)),
    'dtype': 'float32',
    'batch_size': 16,
    'epochs': 4,
    'parallel.devices': 1,
    'eval.k': (5,),
  }
  if of_text:
    tiny |= {
      'data': dict(source='text', name='tiny', path=str(folder / 'sentences.txt')),
      'augment': dict(name='dropout'),
      'model': dict(name='bert_tiny'),
      'projector': dict(name='bert'),
      'eval': dict(k=(), linear=''),
    }
  for key, value in tiny.items():
    config.override(chosen, key, value)
  return chosen


def case(rng: random.Random) -> list[tuple[str, Any]]:
  """One to four changes of the config: (dotted key, value)."""
  flat = config.flatten(base.get_config())
  changes: list[tuple[str, Any]] = []
  for _ in range(rng.choice((1, 1, 2, 3, 4))):
    kind = rng.random()
    if kind < 0.5:
      changes += _named(rng)
    elif kind < 0.9:
      key = rng.choice(sorted(flat))
      changes.append((key, _value(rng, flat[key], CHOICES.get(key))))
    elif kind < 0.95:
      changes.append((_misspelled(rng, rng.choice(sorted(flat))), rng.choice(ODD)))
    else:
      changes.append((rng.choice(sorted(base.get_config())), rng.choice(ODD)))
  if rng.random() < 0.5:  # as typed on a command line
    changes = [(key, value if isinstance(value, str) else repr(value)) for key, value in changes]
  return changes


def _named(rng: random.Random) -> list[tuple[str, Any]]:
  """A section with another name and some of its parameters; a method with a loss that it accepts."""
  section = rng.choice((*TABLES, 'augment', 'augment_other'))
  if section.startswith('augment'):
    changes = [(f'{section}.{key}', _value(rng, augment.OFF[key])) for key in rng.sample(sorted(augment.OFF), 2)]
    return [('augment.name', rng.choice(sorted(augment.PRESETS))), *changes] if section == 'augment' else changes
  name = rng.choice(sorted(TABLES[section]))
  if name.removesuffix('_cifar') in SLOW and rng.random() < 0.9:
    name = 'resnet_tiny'
  changes = [(f'{section}.name', name), *_parameters(rng, section, TABLES[section][name])]
  if section == 'method':
    accepted = methods.METHODS[name].accepts
    loss = rng.choice(sorted(accepted))
    changes += [('loss.name', loss), *_parameters(rng, 'loss', accepted[loss])]
    section, name = 'loss', loss
  if section == 'loss' and rng.random() < 0.8:  # mostly with the temperature that it needs
    loss = TABLES['loss'][name]
    taken = 'temperature' in arguments(loss) and name not in WITHOUT_TEMPERATURE
    changes += [('temperature.name', 'constant'), ('temperature.tau', 0.5)] if taken else [('temperature.name', 'none')]
  return changes


WITHOUT_TEMPERATURE = {name for name, loss in losses.CONTRASTIVE.items() if loss.properties.no_temperature}
GIVEN = {'pos', 'neg', 'where', 'temperature', 'axis_name', 'dtype', 'labels', 'z1', 'z2', 'steps_per_epoch'}


def _parameters(rng: random.Random, section: str, entry: Callable) -> list[tuple[str, Any]]:
  """Values of the parameters without a default, and of some others."""
  changes = []
  for key, parameter in arguments(entry).items():
    needed = parameter.default is inspect.Parameter.empty
    if key in GIVEN or key in methods.Method.GIVEN or rng.random() > (0.9 if needed else 0.2):
      continue
    typical = (
      {int: 2, float: 0.5, str: 'x', bool: False}.get(parameter.annotation, 0.5) if needed else parameter.default
    )
    changes.append((f'{section}.{key}', _value(rng, typical)))
  return changes


def _value(rng: random.Random, typical: Any, choices: Any = None) -> Any:
  """A value like the typical one in three of four cases; otherwise of any type and size."""
  kind = rng.random()
  if choices and kind < 0.8:
    return rng.choice([x for x in choices if isinstance(x, str)])
  if kind < 0.45:
    return typical
  if kind < 0.75:
    if isinstance(typical, bool):
      return rng.random() < 0.5
    if isinstance(typical, int):
      return rng.choice(NUMBERS)
    if isinstance(typical, float) or typical is None:
      return rng.choice(REALS)
    if isinstance(typical, list | tuple):
      return tuple(rng.choice(NUMBERS + REALS) for _ in range(rng.randrange(4)))
  return rng.choice((rng.choice(NUMBERS), rng.choice(REALS), rng.choice(EXTREME), rng.choice(ODD)))


def _misspelled(rng: random.Random, key: str) -> str:
  at = rng.randrange(len(key))
  return rng.choice((key[:at] + key[at + 1 :], key[:at] + 'q' + key[at:], key + '.more', '.' + key, key.upper(), ''))


class Hang(Exception):
  """A case that did not end."""


def run(chosen: Any, changes: list[tuple[str, Any]]) -> str:
  """'valid' or 'refused'; any other end is an AssertionError with its cause."""

  def hang(number, frame):
    raise Hang(f'no end after {SECONDS} s')

  previous = signal.signal(signal.SIGALRM, hang)
  signal.alarm(SECONDS)
  try:
    for key, value in changes:
      config.override(chosen, key, value)
    config.validate(chosen, base.get_config())
    settings.check(chosen.eval)
    built = builder.build(chosen)
    assert built.total_steps >= 1
    return 'valid'
  except ValueError as error:
    message, where = str(error), pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    assert '\n' not in message, f'more than one line: {message!r}'
    assert message, 'an empty message'
    own = 'site-packages' not in where.parts and 'lib' not in where.parts
    assert own, f'raised in {where}: {message}'
    return 'refused'
  except OSError as error:  # main.py prints it in one line too
    assert '\n' not in str(error), f'more than one line: {error}'
    return 'refused'
  except Exception as error:
    last = ''.join(traceback.format_tb(error.__traceback__)[-4:])
    raise AssertionError(f'{type(error).__name__}: {str(error)[:500]}\n{last}') from error
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def fuzz(cases: int, seed: int, first: int = 0, progress: bool = False) -> tuple[dict[str, int], list[str]]:
  """Runs cases. -> ({'valid': ..., 'refused': ..., 'failed': ...}, a description of each failure)"""
  counts: collections.Counter[str] = collections.Counter(valid=0, refused=0, failed=0)
  failures, begun = [], time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    images(pathlib.Path(folder)), sentences(pathlib.Path(folder))
    for number in range(first, first + cases):
      rng = random.Random(f'{seed}/{number}')
      changes = case(rng)
      chosen = start(pathlib.Path(folder), of_text=rng.random() < 0.1)
      try:
        counts[run(chosen, changes)] += 1
      except AssertionError as error:
        counts['failed'] += 1
        failures.append(f'case {number}: {changes!r}\n  {error}')
        if progress:
          print(failures[-1], flush=True)
      if progress and (number + 1 - first) % 100 == 0:
        print(f'{number + 1 - first} of {cases}, {time.monotonic() - begun:.0f} s: {dict(counts)}', flush=True)
  return dict(counts), failures


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  for name, default in (('cases', 300), ('seed', 0), ('first', 0)):
    parser.add_argument(f'--{name}', type=int, default=default)
  given = parser.parse_args()
  counts, failures = fuzz(given.cases, given.seed, given.first, progress=True)
  print(f'{given.cases} cases, seed {given.seed}: ' + ', '.join(f'{n} {name}' for name, n in counts.items()))
  sys.exit(1 if failures else 0)


if __name__ == '__main__':
  main()
