"""DySTreSS (Manna et al. 2024) on CIFAR: Tables 3, 9, 10, 13 and 16, and Figures 1 and 6 to 8.

python -m experiments.dystress.sweep --budget-minutes=25
python -m experiments.dystress.figures
"""

import dataclasses
import functools
import math
import pathlib

from experiments import pictures, runner
from experiments.tables import Column, Row, Sweep, on_cifar100

CONFIG = 'configs/cifar10.py'
KNN, UNIFORMITY, BETWEEN = 'knn200', 'backbone/uniformity', 'backbone/inter_class_uniformity'
RANGES = ((0.07, 0.1), (0.1, 0.2), (0.07, 0.5), (0.2, 0.5))  # tau_min, tau_max of Table 14 and Fig. 6
SHIFTS = ((0.0, 0.5), (0.2, 0.6), (0.4, 0.7), (-0.2, 0.6), (-0.4, 0.7))  # shift, scale of Table 15
RATES = (0.01, 0.03, 0.12, 0.24)  # learning rates other than 0.06 (Fig. 8; our choice, since the text has no values)


def temperature(name: str, **parameters: float) -> dict:
  return {'temperature.name': name, **{f'temperature.{key}': value for key, value in parameters.items()}}


def simclr(tau: float, **more) -> Row:
  # The paper has one SimCLR and does not state its temperature.
  published = {KNN: 83.65, UNIFORMITY: -2.2135, BETWEEN: -0.5194}
  more = {'shows': ('Table 3', 'Table 13'), **more}
  return Row(f'simclr_{tau}', f'SimCLR, τ = {tau}', CONFIG, {'temperature.tau': tau}, published=published, **more)


def moco(name: str, title: str, changes: dict, **more) -> Row:
  published = {KNN: (83.67, 83.9), UNIFORMITY: -2.1929, BETWEEN: -0.5094}
  more = {'shows': ('Table 3', 'Table 13'), **more}
  return Row(name, title, f'{CONFIG}:moco', changes, published=published, **more)


def ranged(low: float, high: float) -> Row:
  changes, more = {'temperature.tau_min': low, 'temperature.tau_max': high}, dict(further=True, shows=('Figure 6',))
  return Row(f'cosine_{low}_{high}', f'cosine, {low} to {high}', f'{CONFIG}:dystress', changes, **more)


def shifted(shift: float, scale: float) -> Row:
  changes = temperature('shifted_cosine', tau_min=0.07, tau_max=0.2, shift=shift, scale=scale)
  return Row(f'shifted_{shift}', f'shifted cosine, {shift}', CONFIG, changes, further=True, shows=('Figure 7',))


def learning_rate(rate: float) -> Row:
  changes, more = {'optimizer.learning_rate': rate}, dict(further=True, shows=('Figure 8',))
  title = f'DySTreSS, cosine, 0.07 to 0.2, learning rate {rate}'
  return Row(f'cosine_learning_rate_{rate}', title, f'{CONFIG}:dystress', changes, **more)


BEST = dict(tau_min=0.07, tau_max=0.2)
TABLES = (
  simclr(0.2, seeds=(0, 1, 2), note='the paper does not print its τ', shows=('Table 3', 'Table 13', 'Figure 6')),
  Row(
    'cosine',
    'DySTreSS, cosine, 0.07 to 0.2',
    f'{CONFIG}:dystress',
    seeds=(0, 1, 2),
    published={KNN: (85.68, 85.85), UNIFORMITY: -2.843, BETWEEN: -0.5797},
    shows=(*(f'Table {number}' for number in (3, 9, 10, 13, 16)), *(f'Figure {number}' for number in (1, 6, 7, 8))),
  ),
  simclr(0.1),
  simclr(0.5),
  Row(
    'dcl',
    'DCL, τ = 0.1',
    f'{CONFIG}:dcl',
    published={KNN: (84.4, 84.47), UNIFORMITY: -2.7717, BETWEEN: -0.5524},
    shows=('Table 3', 'Table 13'),
  ),
  Row('macl', 'MACL, τ₀ = 0.1', f'{CONFIG}:macl', published={KNN: 84.85}, shows=('Table 3',)),
  moco('moco', 'MoCo v2, both directions, τ = 0.1', {'method.symmetric': True}),
  Row(
    'linear',
    'linear, 0.07 to 0.2',
    CONFIG,
    temperature('linear', **BEST),
    published={KNN: 85.74},
    shows=('Table 10',),
  ),
  Row(
    'exponential',
    'exponential, 0.07 to 0.2',
    CONFIG,
    temperature('exponential', **BEST),
    published={KNN: 85.81},
    shows=('Table 10',),
  ),
  Row(
    'monotonic',
    'monotonic cosine, 0.07 to 0.2',
    CONFIG,
    temperature('monotonic_cosine', **BEST),
    published={KNN: 85.84},
    shows=('Table 16',),
  ),
)
DCLW = Row(
  'dclw',
  'DCLW, τ = 0.1',
  f'{CONFIG}:dclw',
  published={KNN: 84.02, UNIFORMITY: -2.5482, BETWEEN: -0.5349},
  further=True,
  shows=('Table 13',),
)
# Table 9 uses a batch of 256.
TABLE_9 = tuple(
  Row(
    name, f'{title}, batch 256', f'{CONFIG}:{name}', {'batch_size': 256}, published={KNN: accuracy}, further=True,
    shows=('Table 9',),
  )
  for name, title, accuracy in (('dino', 'DINO', 84.02), ('w_mse', 'W-MSE', 85.52))
)  # fmt: skip
FIGURE_6, FIGURE_7 = tuple(ranged(*pair) for pair in RANGES), tuple(shifted(*pair) for pair in SHIFTS)
FIGURE_8 = tuple(map(learning_rate, RATES))
# Figure 1, before training, with the same views of the test images as `cosine`.
UNTRAINED = Row(
  'untrained',
  'untrained encoder',
  f'{CONFIG}:dystress',
  {'init': 'random', 'eval.linear': ''},
  minutes=2,
  further=True,
  shows=('Figure 1',),
  mode='evaluate',
)
SIMCLR = {KNN: 52.32, UNIFORMITY: -2.2556, BETWEEN: -0.5246}
CIFAR100 = {
  **{f'simclr_{tau}': SIMCLR for tau in (0.2, 0.1, 0.5)},
  'cosine': {KNN: (56.57, 56.72), UNIFORMITY: -2.8169, BETWEEN: -0.7657},
  'dcl': {KNN: 56.02, UNIFORMITY: -2.8314, BETWEEN: -0.6792},
  'dclw': {KNN: 55.87, UNIFORMITY: -2.6865, BETWEEN: -0.6405},
  'macl': {KNN: 56.15},
  'moco': {KNN: 54.01, UNIFORMITY: -2.2202, BETWEEN: -0.5364},
  'linear': {KNN: 56.78},
  'exponential': {KNN: 56.47},
  'monotonic': {KNN: 56.21},
  'dino': {KNN: 46.79},
  'w_mse': {KNN: 52.72},
}


def also_on_cifar100(row: Row) -> Row:
  row = on_cifar100(row, CIFAR100.get(row.name, {}))
  return dataclasses.replace(row, shows=tuple(item for item in row.shows if item != 'Figure 1'))  # CIFAR-10 only


SWEEP = Sweep(
  title='Dynamically Scaled Temperature in Self-Supervised Contrastive Learning (DySTreSS), CIFAR-10',
  protocol=(
    'CIFAR-10 unless a row says CIFAR-100. ResNet-18, 200 epochs, last epoch. '
    'kNN: backbone features (512), 200 neighbors among the 50,000 training images, votes weighted by exp(s/0.1), '
    'the 10,000 test images as queries. Uniformity and inter-class uniformity: backbone features of the test images; '
    'lower is more uniform.'
  ),
  columns=(
    Column(KNN, 'kNN-200, %'),
    Column(UNIFORMITY, 'uniformity'),
    Column(BETWEEN, 'inter-class uniformity'),
  ),
  figures={
    'temperatures': functools.partial(
      pictures.simclr_and_dystress, metric=KNN, titles={'': 'CIFAR-10', 'cifar100_': 'CIFAR-100'}
    )
  },
  rows=(
    *TABLES,
    # The authors' code differs from the paper: SGD without momentum, learning rate 0.2.
    Row(
      'simclr_0.2_plain_sgd',
      'SimCLR, τ = 0.2, no momentum, learning rate 0.2',
      CONFIG,
      {'temperature.tau': 0.2, 'optimizer.momentum': 0.0, 'optimizer.learning_rate': 0.2},
      published={KNN: 83.65},
      further=True,
      shows=('Table 3',),
    ),
    Row(
      'cosine_plain_sgd',
      'DySTreSS, no momentum, learning rate 0.2',
      f'{CONFIG}:dystress',
      {'optimizer.momentum': 0.0, 'optimizer.learning_rate': 0.2},
      published={KNN: (85.68, 85.85)},
      further=True,
      shows=('Table 3',),
    ),
    # Batch norm per view, as in the paper's algorithm and code.
    Row(
      'simclr_0.2_views_apart',
      'SimCLR, τ = 0.2, views encoded separately',
      CONFIG,
      {'temperature.tau': 0.2, 'method.views_apart': True},
      published={KNN: 83.65},
      further=True,
      shows=('Table 3',),
    ),
    Row(
      'cosine_views_apart',
      'DySTreSS, views encoded separately',
      f'{CONFIG}:dystress',
      {'method.views_apart': True},
      published={KNN: (85.68, 85.85)},
      further=True,
      shows=('Table 3',),
    ),
    simclr(0.15, further=True),  # the paper's SimCLR lies between ours at 0.1 and 0.2
    simclr(0.07, further=True),
    simclr(1.0, further=True),
    *FIGURE_6,
    *FIGURE_7,
    DCLW,
    Row('dcl_cosine', 'DCL with DySTreSS', f'{CONFIG}:dcl,dystress', further=True),
    # In the authors' code for DCL, the gradient flows through the temperature.
    Row(
      'dcl_cosine_gradient',
      'DCL with DySTreSS, gradient through τ',
      f'{CONFIG}:dcl,dystress',
      {'temperature.gradient': True},
      further=True,
    ),
    # The exponential of the authors' code, 0.2 − 0.1 e^(−3.5|s|), which is concave. The paper has no formula.
    Row(
      'exponential_code',
      'exponential of the code, 0.1 to 0.197',
      CONFIG,
      temperature('exponential', tau_min=0.1, tau_max=0.2 - 0.1 * math.exp(-3.5), rate=-3.5),
      published={KNN: 85.81},
      further=True,
      shows=('Table 10',),
    ),
    moco('moco_one_way', 'MoCo v2, τ = 0.1', {}, further=True),
    Row(
      'moco_cosine',
      'MoCo v2, both directions, with DySTreSS',
      f'{CONFIG}:moco,dystress',
      {'method.symmetric': True},
      minutes=8,
      further=True,
    ),
    Row('kukleva', "Kukleva's schedule, 0.1 to 1", f'{CONFIG}:kukleva', further=True),
    *TABLE_9,
    UNTRAINED,
    *FIGURE_8,
    *map(also_on_cifar100, (*TABLES, DCLW, *TABLE_9, *FIGURE_6, *FIGURE_7, *FIGURE_8)),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
