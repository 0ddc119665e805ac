"""Trains and judges self-supervised representations.

python main.py --config=configs/cifar10.py:dystress --workdir=runs/dystress --config.seed=1
python main.py --mode=evaluate --workdir=runs/dystress    # and report, export
python main.py --mode=compare --workdir=runs/compared runs/cifar10 runs/dystress
python main.py --mode=views --config=configs/cifar10.py --workdir=runs/views
"""

import pathlib
import sys
import traceback

from absl import app, flags, logging

MODES = ('train', 'evaluate', 'export', 'report', 'compare', 'views')
CONFIG = flags.DEFINE_string('config', None, 'FILE.py[:options]; any of its keys is a flag too: --config.seed=1.')
WORKDIR = flags.DEFINE_string('workdir', None, 'Where the run lives; the same command goes on where it stopped.')
MODE = flags.DEFINE_string('mode', 'train', ', '.join(MODES) + ' (a contact sheet of augmented views).')


def run(arguments):
  from configs import base
  from ssl_jax import config, registry, train
  from ssl_jax.evals import evaluate
  from ssl_jax.reporting import export, report
  from ssl_jax.run import devices
  from ssl_jax.workdir import files

  overrides = [a.removeprefix('--config.') for a in arguments if a.startswith('--config.') and '=' in a]
  others = [a for a in arguments if not (a.startswith('--config.') and '=' in a)]
  for argument in others:
    if MODE.value != 'compare' or argument.startswith('-'):
      raise ValueError(f'{argument!r} is no flag: the flags are --config, --config.KEY=VALUE, --workdir and --mode')
  if MODE.value not in MODES:
    raise ValueError(f'--mode={MODE.value!r} does not exist: {registry.nearest(MODE.value, MODES)}')
  if not WORKDIR.value:
    raise ValueError('--workdir is missing: give the directory of the run, such as --workdir=runs/first')
  if MODE.value in ('report', 'compare'):
    if CONFIG.value or overrides:
      raise ValueError(f'--mode={MODE.value} shows what was measured, and takes no --config: leave it out')
    return report.compare(others, WORKDIR.value) if MODE.value == 'compare' else report.report(WORKDIR.value)
  if CONFIG.value:
    chosen = config.load(CONFIG.value, overrides)
  elif MODE.value in ('evaluate', 'export'):
    chosen = config.restore(files.read_config(WORKDIR.value), base.get_config(), overrides)
  else:
    raise ValueError('--config is missing: give a file, such as --config=configs/quickstart.py')
  config.validate(chosen, base.get_config())
  if MODE.value == 'export':
    return export.export(chosen, WORKDIR.value)
  devices.start(chosen.parallel.processes, chosen.parallel.cpu_devices)
  devices.compile_faster(chosen.deterministic)
  {'train': train.train, 'evaluate': evaluate.evaluate, 'views': evaluate.draw_views}[MODE.value](chosen, WORKDIR.value)


def main(argv):
  from ssl_jax import train

  logging.set_verbosity(logging.ERROR)  # orbax tells of every file
  try:
    run(argv[1:])
  except (train.Diverged, train.Interrupted) as error:
    sys.exit(f'ssl_jax: {error}')
  except KeyboardInterrupt:
    sys.exit('ssl_jax: interrupted; what was saved before is there, and the same command goes on from it')
  except OSError as error:
    sys.exit(f'ssl_jax: {error}')
  except ValueError as error:
    # A mistake that this project found is told in one line; whatever a library raises keeps its traceback.
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if not raised_in.is_relative_to(pathlib.Path(__file__).parent) or '.venv' in raised_in.parts:
      raise
    sys.exit(f'ssl_jax: {error}')


if __name__ == '__main__':
  # The config's own keys are flags that absl does not know; they come through as arguments.
  app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
