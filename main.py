"""Trains and evaluates self-supervised representations.

python main.py --config=configs/cifar10.py:dystress --config.seed=1
python main.py --mode=evaluate --workdir=runs/cifar10_dystress_seed=1    # or report, export
python main.py --mode=transfer --workdir=runs/cifar10 cifar100 birds=/data/birds    # 5-shot, on other datasets
python main.py --mode=compare --workdir=runs/compared runs/cifar10 runs/cifar10_dystress_seed=1
python main.py --mode=views --config=configs/cifar10.py
python main.py --mode=prepare --config=configs/cifar10.py    # downloads CIFAR-10; append a file to use a local copy
"""

import difflib
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from absl import app, flags, logging

# ssl_jax is imported where it is used: the import takes seconds, and a wrong flag should fail at once.

MODES = ('train', 'evaluate', 'transfer', 'export', 'report', 'compare', 'views', 'prepare')
CONFIG = flags.DEFINE_string('config', None, 'FILE.py[:options]; any of its keys is a flag too: --config.seed=1.')
WORKDIR = flags.DEFINE_string(
  'workdir', None, "The run's directory (default: runs/NAME, after --config); the same command resumes its run."
)
MODE = flags.DEFINE_string('mode', 'train', ', '.join(MODES) + ' (views: a contact sheet; prepare: set up a dataset).')
ANY_MD5 = flags.DEFINE_bool('any_md5', False, '--mode=prepare: accept local archives with another md5.')


class Command(NamedTuple):
  """The command line, after checks."""

  mode: str
  config: str
  overrides: list[str]  # KEY=VALUE
  workdir: str  # '': the config's default
  paths: list[str]  # runs of --mode=compare, archives of --mode=prepare, datasets of --mode=transfer


def parse(arguments: Sequence[str]) -> Command:
  """Combines the flags and `arguments`, those that absl did not parse. Raises a ValueError for a mistake."""
  overrides, paths = [], []
  rest = iter(arguments)
  for argument in rest:
    if not argument.startswith('--config.'):
      paths.append(argument)
      continue
    if '=' not in argument:  # --config.KEY VALUE
      value = next(rest, '--')
      if value.startswith('--'):
        raise ValueError(f'{argument!r} has no value: give {argument}=VALUE')
      argument = f'{argument}={value}'
    overrides.append(argument.removeprefix('--config.'))
  mode, config, workdir = MODE.value, CONFIG.value or '', WORKDIR.value or ''
  for text in (config, workdir, *arguments):
    if '\0' in text:
      raise ValueError(f'{text!r} has a NUL character, which no path or value may have: remove it')
  if mode not in MODES:
    close = difflib.get_close_matches(mode, MODES, n=1)
    fix = f'did you mean {close[0]!r}?' if close else f'give one of {", ".join(MODES)}'
    raise ValueError(f'--mode={mode!r} is not a valid mode: {fix}')
  for argument in paths:
    if mode not in ('compare', 'prepare', 'transfer') or argument.startswith('-'):
      raise ValueError(f'{argument!r} is not a flag: give --config, --config.KEY=VALUE, --workdir or --mode')
  if mode == 'compare' and not workdir:
    raise ValueError('--workdir is missing: give a directory for the comparison, such as --workdir=runs/compared')
  if mode in ('report', 'compare') and workdir and (config or overrides):
    raise ValueError(f'--mode={mode} shows the results in --workdir and takes no --config: leave it out')
  if not config and mode in ('train', 'views', 'prepare'):
    raise ValueError('--config is missing: give a file, such as --config=configs/quickstart.py')
  if not config and not workdir:
    raise ValueError('--workdir is missing: give the directory of the run, such as --workdir=runs/quickstart')
  return Command(mode, config, overrides, workdir, paths)


def run(command: Command) -> None:
  """Runs a command."""
  from configs import base
  from ssl_jax import config
  from ssl_jax.workdir import files

  mode = command.mode
  chosen = config.load(command.config, command.overrides) if command.config else None
  workdir = command.workdir
  if chosen and not workdir:
    own = chosen.data.source == 'folder' and chosen.data.name == config.set_name(chosen.data.path)
    workdir = str(files.default(command.config, command.overrides, chosen.data.name if own else ''))
  if mode in ('report', 'compare'):
    from ssl_jax.reporting import compare, report

    report.report(workdir) if mode == 'report' else compare.compare(command.paths, workdir)
    return
  if chosen is None:
    chosen = config.restore(files.read_config(workdir), base.get_config(), command.overrides)
  config.validate(chosen, base.get_config())
  if mode == 'prepare':
    from ssl_jax.data import prepare

    prepare.prepare(chosen.data, command.paths, ANY_MD5.value)
    return
  if command.config:
    from ssl_jax.run import builder

    if shortened := builder.shorten_warmup(chosen, *config.changed(command.config, command.overrides)):
      print(shortened, flush=True)
  if mode == 'export':
    from ssl_jax.reporting import export

    export.export(chosen, workdir)
    return
  from ssl_jax import train
  from ssl_jax.evals import evaluate, transfer
  from ssl_jax.reporting import views
  from ssl_jax.run import devices, watch

  devices.compile_faster(chosen.deterministic)
  devices.start(chosen.parallel.processes, chosen.parallel.cpu_devices)
  watch.start()
  local = ('data.path', 'data.cache', 'data.workers', 'eval.data.path', 'init')  # may differ between hosts
  try:
    devices.require_same({'--mode': mode} | {k: v for k, v in config.flatten(chosen).items() if k not in local})
    if mode == 'transfer':
      transfer.transfer(chosen, workdir, command.paths)
    else:
      {'train': train.train, 'evaluate': evaluate.evaluate, 'views': views.draw_views}[mode](chosen, workdir)
  except (train.Interrupted, train.Diverged, devices.Different):  # all processes raise these
    watch.end()
    raise
  watch.end()


def _exit_if_full(error: Exception) -> None:
  from ssl_jax.workdir import files

  if files.is_full(error):
    unnamed = 'data.path' if MODE.value == 'prepare' else 'the disk'
    place = getattr(error, 'filename', None) or WORKDIR.value or unnamed
    _exit(f'{place} cannot be written (no space left): make room there, and the same command {_again()}')


def main(argv: Sequence[str]) -> None:
  """Runs the command line. A user's mistake is reported in one line."""
  logging.set_verbosity(logging.FATAL)  # orbax logs every file, and logs its errors before it raises them
  try:
    run(parse(argv[1:]))
  except KeyboardInterrupt:
    _exit(f'interrupted; the same command {_again()}')
  except ModuleNotFoundError as error:
    if (error.name or '').partition('.')[0] in ('ssl_jax', 'configs'):
      raise
    _exit(f"{error.name} is not installed: pip install -e '.[train]'")
  except OSError as error:
    _exit_if_full(error)
    _exit(error)
  except ValueError as error:
    # An error raised by this project is reported in one line; an error raised by a library keeps its traceback.
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    root = pathlib.Path(__file__).resolve().parent
    if not any(raised_in.is_relative_to(root / part) for part in ('main.py', 'ssl_jax', 'configs')):
      _unexplained(error)
    _exit(error)
  except Exception as error:
    from ssl_jax.train import Diverged, Interrupted

    _exit_if_full(error)
    if 'Could not determine home directory' in str(error):
      _exit('the home directory of a path that begins with ~ is unknown: set HOME, or give full paths')
    if not isinstance(error, Diverged | Interrupted):
      _unexplained(error)
    _exit(error)


def _leave_to_the_main_thread() -> None:
  """Silences library threads if the disk is full: the main thread gets the same error and reports it in one line."""
  in_thread, anywhere = threading.excepthook, sys.unraisablehook

  def known(error):
    from ssl_jax.workdir import files

    return files.is_full(error) or 'Event loop is closed' in str(error)  # from orbax, after a failed write

  threading.excepthook = lambda given: None if known(given.exc_value) else in_thread(given)
  sys.unraisablehook = lambda given: None if known(given.exc_value) else anywhere(given)


def _again() -> str:
  """What the same command does after an interruption."""
  kept = {
    'train': 'resumes from the last checkpoint, if there is one',
    'transfer': 'resumes after the last finished part',
  }
  return kept.get(MODE.value, 'starts again')


def _exit(message: str | Exception) -> NoReturn:
  watch = sys.modules.get('ssl_jax.run.watch')
  if watch and watch.active():
    watch.fail(f'ssl_jax: {message}')
  sys.exit(f'ssl_jax: {message}')


def _unexplained(error: Exception) -> NoReturn:
  """Raises the error of a library. If a lost process caused it, that process is reported instead."""
  watch = sys.modules.get('ssl_jax.run.watch')
  if watch and watch.active():
    time.sleep(watch.REACTION)
    watch.fail(''.join(traceback.format_exception(error)))
  raise error


if __name__ == '__main__':
  _leave_to_the_main_thread()
  # absl does not know the config's keys, and passes them on as arguments.
  app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
