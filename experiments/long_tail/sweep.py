"""DySTreSS (Manna et al. 2024) on long-tailed CIFAR: Tables 4, 6 and 7.

python -m experiments.long_tail.sweep --budget-minutes=25
"""

import functools
import pathlib

from experiments import pictures, runner
from experiments.tables import Column, Row, Sweep, on_cifar100

CONFIG = 'configs/cifar10.py:long_tail'
# From the code of Kukleva et al. (2023).
LONG = {
  'epochs': 2000,
  'batch_size': 512,
  'augment.crop_scale': (0.1, 1.0),
  'augment.interpolation': 'bicubic',
  'optimizer.learning_rate': 0.5,
  'optimizer.weight_decay': 1e-4,
  'optimizer.warmup_epochs': 10.0,
}


def accuracies(one: float, ten: float) -> dict[str, float]:
  return {'knn1': one, 'knn10': ten}


def simclr(tau: float, **more) -> Row:
  published = accuracies(57.12, 55.29)
  more = dict(published=published, shows=('Table 6',), **more)
  return Row(f'simclr_{tau}', f'SimCLR, τ = {tau}', CONFIG, {'temperature.tau': tau}, **more)


TABLE_6 = (
  simclr(0.2, minutes=4, note='the paper does not print its τ'),
  Row(
    'cosine',
    'DySTreSS, cosine, 0.07 to 0.2',
    f'{CONFIG},dystress',
    published=accuracies(58.36, 56.40),
    minutes=4,
    shows=('Table 6',),
  ),
  Row(
    'cosine_0.1_0.2',
    'DySTreSS*, cosine, 0.1 to 0.2',
    f'{CONFIG},dystress',
    {'temperature.tau_min': 0.1},
    published=accuracies(58.34, 56.54),
    minutes=4,
    shows=('Table 6',),
  ),
  simclr(0.1, minutes=4, further=True),
  simclr(0.5, minutes=4, further=True),
)
CIFAR100 = {
  **dict.fromkeys(('simclr_0.1', 'simclr_0.2', 'simclr_0.5'), accuracies(28.27, 26.18)),
  'cosine': accuracies(29.43, 27.10),
  'cosine_0.1_0.2': accuracies(28.82, 27.32),
}
# The numbers for Kukleva et al. are from their own paper, with one neighbor.
TABLE_4 = (
  Row(
    'kukleva_2000',
    "Kukleva's schedule, 0.1 to 1, 2,000 epochs",
    f'{CONFIG},kukleva',
    LONG,
    published={'knn1': 62.91},
    minutes=15,
    further=True,
    shows=('Table 4',),
  ),
  Row(
    'cosine_2000',
    'DySTreSS, cosine, 0.07 to 0.2, 2,000 epochs',
    f'{CONFIG},dystress',
    LONG,
    published={'knn1': 64.98},
    minutes=15,
    further=True,
    shows=('Table 4',),
  ),
)
SWEEP = Sweep(
  title='DySTreSS on long-tailed CIFAR-10 and CIFAR-100',
  protocol=(
    'CIFAR-10-LT unless a row says CIFAR-100: class c = 0 … C−1 keeps 0.01^(c/(C−1)) of its images, '
    '12,406 in total (CIFAR-100-LT: 10,847). ResNet-18, 500 epochs, last epoch. kNN: backbone features (512), 1 and '
    '10 neighbors among these training images, votes weighted by 1/distance, the 10,000 balanced test images as '
    'queries.'
  ),
  columns=(Column('knn1', '1-NN, %'), Column('knn10', '10-NN, %')),
  rows=(
    *TABLE_6,
    *(on_cifar100(row, CIFAR100[row.name], shows=('Table 7',)) for row in TABLE_6),
    *TABLE_4,
    *(on_cifar100(row, {'knn1': accuracy}) for row, accuracy in zip(TABLE_4, (30.20, 31.71), strict=True)),
  ),
  images=12_406,
  figures={
    'temperatures': functools.partial(
      pictures.simclr_and_dystress, metric='knn1', titles={'': 'CIFAR-10-LT', 'cifar100_': 'CIFAR-100-LT'}
    )
  },
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
