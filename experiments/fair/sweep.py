"""Which loss is best when each is tuned equally? CIFAR-10: nine settings per loss, then three seeds of the best one.

  python -m experiments.fair.sweep --budget-minutes=28 --side-by-side=4    # the same command resumes
  python -m experiments.fair.figures                                       # results.jsonl -> tables and heat maps

Selection: 3 learning rates x 3 temperatures (or values of a similar parameter), trained on 45,000 images and scored by
kNN on the other 5,000 training images. When all nine settings of a loss have a result, the sweep adds its final row:
the best setting, trained on all training images for twice as long, with three seeds, and evaluated on the test set.
"""

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Mapping

from experiments import runner, tables
from experiments.tables import Column, Row, Sweep

FOLDER = pathlib.Path(__file__).parent
CONFIG, METRIC = 'configs/cifar10.py', 'knn200'
EPOCHS, IMAGES, SEEDS = (100, 200), (45_000, 50_000), (0, 1, 2)  # selection, final; seeds of a final row
# The same split for every selection run: the first 45,000 training images for training, the last 5,000 for scoring.
HELD_OUT = {'data.train_split': 'train[:90%]', 'data.test_split': 'train[90%:]'}
RATES = (0.12, 0.36, 1.08)  # learning rates
# Names of settings whose loss diverges. They count as worse than any accuracy, and are not run. None has a result.
DIVERGED: tuple[str, ...] = ()

Setting = tuple[float, float]  # learning rate, strength
Finished = Mapping[tuple[str, int], Mapping]  # {(name of a row, seed): its result}


@dataclasses.dataclass(frozen=True)
class Loss:
  """A loss, and the parameter that is tuned together with the learning rate."""

  title: str
  symbol: str
  values: tuple[float, float, float]
  keys: Mapping[str, float]  # {config key: factor}; the key is set to factor · value
  fixed: Mapping  # overrides that all settings share; names come before their parameters

  def changes(self, rate: float, value: float) -> dict:
    varied = {key: round(factor * value, 6) for key, factor in self.keys.items()}
    return {**self.fixed, **varied, 'optimizer.learning_rate': rate}

  def describe(self, rate: float, value: float) -> str:
    return f'{self.symbol} = {value:g}, learning rate {rate:g}'


TAU, NONE = {'temperature.tau': 1.0}, {'temperature.name': 'none'}
LOSSES = {
  'nt_xent': Loss('NT-Xent', 'τ', (0.1, 0.2, 0.4), TAU, {}),
  'dystress': Loss(
    'DySTreSS',
    'τ_max',
    (0.1, 0.2, 0.4),
    {'temperature.tau_min': 0.35, 'temperature.tau_max': 1.0},
    {'temperature.name': 'cosine'},
  ),
  'dcl': Loss('DCL', 'τ', (0.07, 0.14, 0.28), TAU, {'loss.name': 'decoupled'}),
  'macl': Loss('MACL', 'τ₀', (0.05, 0.1, 0.2), {'loss.tau0': 1.0}, {**NONE, 'loss.name': 'macl', 'loss.alpha': 0.5}),
  'balanced': Loss(
    'balanced', 'α', (1.0, 2.0, 4.0), {'loss.alpha': 1.0}, {**NONE, 'loss.name': 'balanced', 'loss.lam': 4.0}
  ),
  'cacr': Loss('CACR, K = 1', 't⁻', (1.0, 2.0, 4.0), {'loss.t_neg': 1.0}, {**NONE, 'loss.name': 'cacr'}),
  'align_uniform': Loss(
    'alignment and uniformity', 't', (1.0, 2.0, 4.0), {'loss.t': 1.0}, {**NONE, 'loss.name': 'align_uniform'}
  ),
  'hcl': Loss(
    'HCL', 'τ', (0.25, 0.5, 1.0), TAU, {'loss.name': 'hard_negative', 'loss.beta': 1.0, 'loss.tau_plus': 0.1}
  ),
}


def grid(loss: str) -> list[Setting]:
  """The nine settings of a loss, the most informative first: the middle of the grid, its edges, its corners."""
  settings = list(itertools.product(RATES, LOSSES[loss].values))
  return sorted(settings, key=lambda setting: from_middle(loss, setting))


def from_middle(loss: str, setting: Setting) -> int:
  """How many of the two parameters are at the edge of their range."""
  return len(edges(loss, setting))


def edges(loss: str, setting: Setting) -> list[str]:
  """The parameters of a setting that are at the edge of their range."""
  rate, value = setting
  found = {'learning rate': (rate, RATES), LOSSES[loss].symbol: (value, LOSSES[loss].values)}
  return [name for name, (chosen, known) in found.items() if chosen != known[1]]


def name_of(loss: str, setting: Setting) -> str:
  return f'{loss}_{setting[0]:g}_{setting[1]:g}'


def accuracies(loss: str, finished: Finished) -> dict[Setting, float]:
  """{setting: accuracy on the held-out images}, for the settings with a result. Only seed 0 is used."""
  found = {}
  for setting in grid(loss):
    name = name_of(loss, setting)
    if name in DIVERGED:
      found[setting] = float('-inf')
    elif (name, 0) in finished:
      found[setting] = finished[name, 0]['metrics'][METRIC]
  return found


def best(loss: str, finished: Finished) -> Setting | None:
  """The setting with the highest accuracy on the held-out images; None until all nine are known, or if all diverged.

  Ties: the setting nearer to the middle of the grid, then the lower learning rate, then the lower value.
  """
  found = accuracies(loss, finished)
  if len(found) < len(grid(loss)) or not any(map(math.isfinite, found.values())):
    return None
  return min(found, key=lambda setting: (-found[setting], from_middle(loss, setting), *setting))


def selection(loss: str, setting: Setting) -> Row:
  chosen = LOSSES[loss]
  return Row(
    name=name_of(loss, setting),
    title=f'{chosen.title}, {chosen.describe(*setting)}, held-out images',
    config=CONFIG,
    changes={**chosen.changes(*setting), **HELD_OUT, 'epochs': EPOCHS[0]},
    minutes=2.5,
    further=from_middle(loss, setting) > 0,
    images=IMAGES[0],
  )


def final(loss: str, setting: Setting) -> Row:
  chosen, at = LOSSES[loss], ' and '.join(edges(loss, setting))
  return Row(
    name=f'final_{loss}',
    title=f'{chosen.title}, {chosen.describe(*setting)}, 200 epochs, test set',
    config=CONFIG,
    changes={**chosen.changes(*setting), 'epochs': EPOCHS[1], 'eval.linear_during': True},
    seeds=SEEDS,
    minutes=5.0,
    note=f'at the edge of the grid: {at}' if at else '',
    further=True,  # after all settings
    images=IMAGES[1],
  )


def make(finished: Finished) -> Sweep:
  """The sweep, with a final row for each loss whose selection is complete."""
  if both := sorted({name for name, _ in finished} & set(DIVERGED)):
    raise ValueError(f'DIVERGED has {both[0]!r}, which has a result: remove one of them')
  settings = [(loss, setting) for loss in LOSSES for setting in grid(loss)]
  settings.sort(key=lambda pair: grid(pair[0]).index(pair[1]))  # the first setting of every loss, then the second, ...
  rows = [selection(*pair) for pair in settings if name_of(*pair) not in DIVERGED]
  finals = [final(loss, setting) for loss in LOSSES if (setting := best(loss, finished))]
  return Sweep(
    title='Which loss is best when each is tuned equally? CIFAR-10',
    protocol=(
      'CIFAR-10, ResNet-18, batch 512, SGD, 5 epochs of warm-up, cosine schedule, last epoch. kNN: backbone features '
      '(512), 200 neighbors, votes weighted by exp(cosine / 0.1). Held-out images: 100 epochs on 45,000 training '
      'images, which are also the neighbors; the other 5,000 are the queries. Test set: 200 epochs on all 50,000 '
      'training images; the queries are the 10,000 test images, also of the linear (logistic) classifier.'
    ),
    columns=(Column(METRIC, 'kNN-200, %'), Column('linear', 'linear, %')),
    common={
      'batch_size': 512,
      'optimizer.warmup_epochs': 5.0,
      'eval.every_epochs': 0,
      'data.cache': 'runs/fair/images',
      'log.tensorboard': False,
    },
    at_end=False,
    rows=(*rows, *finals),
  )


def read(folder: pathlib.Path = FOLDER) -> Finished:
  return {(result['name'], result['seed']): result for result in tables.read(folder / 'results.jsonl')}


SWEEP = make(read())

if __name__ == '__main__':
  runner.main(SWEEP, FOLDER)
  if '--list' not in sys.argv:
    from experiments.fair import figures  # reads the results again, which may add final rows

    figures.main()
