"""Two training steps with every config of docs/reproduce, at small size. By hand, since it takes one to two hours:

    python -m tests.page --processes=2

Encoders keep their depth; width, image size, batch and data are reduced. `make test-all` builds every one of these
configs, and takes two steps with whatever they are made of.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from multiprocessing import get_context

import tests.conftest  # noqa: F401  before jax: compiles quickly rather than well, and equal programs once

import jax  # isort: skip
import numpy as np
from ml_collections import ConfigDict

from configs import base
from experiments import papers
from ssl_jax import config, methods, train
from ssl_jax.models import heads
from ssl_jax.run import builder

ROWS = [
  (name, row)
  for paper in papers.PAPERS.values()
  for name in paper.sweeps
  for row in papers.sweep(name).rows
  if row.mode == 'train'
]
CLASSES, PER_CLASS = 10, 12


def data(folder):
  """Writes generated images, in classes of equal size, and sentences. Returns the folder."""
  rng = np.random.default_rng(0)
  labels = np.tile(np.arange(CLASSES), PER_CLASS)
  images = rng.integers(0, 256, (len(labels), 16, 16, 3), np.uint8)
  few = slice(0, 2 * CLASSES)
  arrays = dict(train_images=images, train_labels=labels, test_images=255 - images[few], test_labels=labels[few])
  np.savez(folder / 'images.npz', **arrays)
  words = ['one', 'two', 'three', 'four', 'five']
  (folder / 'sentences.txt').write_text(''.join(f'{" ".join(rng.choice(words, 5))} {i}\n' for i in range(32)))
  return folder


def narrower(chosen):
  """Changes that make the encoder, the heads and the queue small."""
  changes = {}
  if chosen.model.name != 'alexnet_small':  # its width is fixed
    changes['model.width'] = 48 if chosen.model.name.startswith(('vit', 'bert')) else 8  # 12 heads
  kind, queue = methods.METHODS[chosen.method.name], chosen.method.get('queue', 0)
  predictor = dict(name=kind.predictor, **chosen.method.get('predictor', {})) if kind.predictor else {}
  for key, head in {'projector': dict(chosen.projector), 'method.predictor': predictor}.items():
    made = heads.create(**head) if head else None
    small = {name: getattr(made, name) for name in ('features', 'prototypes', 'number') if hasattr(made, name)}
    small = {name: min(x, 4) if isinstance(x, int) else tuple(w and min(w, 4) for w in x) for name, x in small.items()}
    if key == 'projector':
      changes |= {f'{key}.{name}': value for name, value in small.items()}
    elif small:
      changes[key] = {**{name: x for name, x in predictor.items() if name != 'name'}, **small}
  return changes | ({'method.queue': 16} if queue else {})


def small(row, sweep, folder):
  """The config of a run with fewer and smaller images, a narrower network and two steps."""
  planned = papers.sweep(sweep).resolve(row, 0)
  chosen = ConfigDict(planned)
  changes = {'batch_size': 8, 'steps': 2, 'init': '', 'parallel.devices': 1, **narrower(chosen)}
  changes |= {'eval.at_end': False, 'eval.every_epochs': 0, 'eval.k': (), 'eval.sts': ''}
  changes |= {'eval.transfer': '', 'log.tensorboard': False}
  if chosen.data.source == 'text':
    changes |= {'data.path': str(folder / 'sentences.txt'), 'data.vocabulary': '', 'data.tokens': 8}
  else:
    changes |= {'data.source': 'arrays', 'data.path': str(folder / 'images.npz'), 'data.image_size': 16}
    changes |= {'data.stored_size': 0, 'data.classes': '', 'data.on_device': 'auto', 'data.workers': 0}
    changes |= {'data.train_split': 'train', 'data.test_split': 'test'}
  if chosen.imbalance.name in ('pareto', 'uniform'):
    changes['imbalance.total'] = CLASSES * PER_CLASS // 2
  if chosen.imbalance.name == 'pareto':
    changes |= {'imbalance.n_max': PER_CLASS, 'imbalance.n_min': 1}
  for key, value in changes.items():
    config.override(chosen, key, value)
  builder.shorten_warmup(chosen, ['steps'], ConfigDict(planned))
  chosen.eval.data = dict.fromkeys(chosen.eval.data, '')
  config.validate(chosen, base.get_config())
  return chosen


def two_steps(chosen):
  """Trains for the two steps of a small config. Returns their losses."""
  run = builder.build(chosen)
  state, losses = run.devices.replicate(run.initial_state()), []
  for call, _ in train._calls(run, 0):
    state, metrics = call(state)
    losses.append(float(np.ravel(metrics['loss'])[0]))
  assert len(losses) == 2
  return losses


def training_settings(chosen):
  """What two steps depend on: everything but evaluation and logging."""
  flat = config.flatten(chosen)
  return json.dumps({k: v for k, v in flat.items() if not k.startswith(('eval.', 'log.', 'checkpoint.'))}, default=str)


def _try(named):
  """The name of a row, and its error in one line or an empty string."""
  name, chosen = named
  try:
    losses = two_steps(chosen)
    error = '' if np.isfinite(losses).all() else f'losses {losses}'
  except Exception as failure:  # every row is tried, whatever happens to one of them
    error = f'{type(failure).__name__}: {failure}'.splitlines()[0]
  jax.clear_caches()
  return name, error


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  parser.add_argument('--processes', type=int, default=1)
  parser.add_argument('--sweep', default='', help='only the rows of this sweep')
  given = parser.parse_args()
  begun, failed = time.monotonic(), 0
  with tempfile.TemporaryDirectory() as place:
    folder = data(pathlib.Path(place))
    rows = {}  # the first row of each distinct config
    for sweep, row in ROWS:
      if given.sweep in ('', sweep):
        chosen = small(row, sweep, folder)
        rows.setdefault(training_settings(chosen), (f'{sweep} {row.name}', chosen))
    with get_context('spawn').Pool(given.processes, maxtasksperchild=25) as pool:
      for done, (name, error) in enumerate(pool.imap_unordered(_try, rows.values()), 1):
        failed += bool(error)
        print(f'{done} of {len(rows)}, {time.monotonic() - begun:,.0f} s: {name} {error}'.rstrip(), flush=True)
  print(f'{len(rows)} distinct configs, {len(rows) - failed} passed, {failed} failed')
  sys.exit(1 if failed else 0)


if __name__ == '__main__':
  main()
