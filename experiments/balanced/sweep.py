"""The balanced contrastive loss (Lee 2025) on CIFAR-10: Table 4 and Figure 5.

python -m experiments.balanced.sweep --budget-minutes=25
"""

import dataclasses
import itertools
import pathlib

from experiments import runner
from experiments.tables import Column, Row, Sweep

CONFIG = 'configs/cifar10.py:balanced'
LOSSES = {'balanced': 'balanced', 'generalized_nt_xent': 'generalised NT-Xent'}
# The paper does not say whether its classifier sees crops and flips: both are compared with its number.
# Figure 5 prints no numbers.
PUBLISHED = {('balanced', 2, 4): {'knn1': 80.32, 'linear': 86.08, 'finetune': 86.08}}
REQUIRED = (('balanced', 2, 4), ('balanced', 4, 2), ('balanced', 1, 1), ('generalized_nt_xent', 2, 2))
GRID = [(loss, *pair) for loss in LOSSES for pair in itertools.product((1, 2, 4, 8), repeat=2)]


def cell(loss: str, alpha: int, lam: int) -> Row:
  return Row(
    name=f'{loss}_{alpha}_{lam}',
    title=f'{LOSSES[loss]}, α = {alpha}, λ = {lam}',
    config=CONFIG,
    changes={'loss.name': loss, 'loss.alpha': float(alpha), 'loss.lam': float(lam)},
    published=PUBLISHED.get((loss, alpha, lam), {}),
    seeds=(0, 1, 2) if (loss, alpha, lam) in PUBLISHED else (0,),
    minutes=6,
    note='published: ± 0.32 and ± 0.07 over 5 runs' if (loss, alpha, lam) in PUBLISHED else '',
    further=(loss, alpha, lam) not in REQUIRED,
  )


def cosine(name: str, title: str, changes: dict, choice: tuple[str, int, int] = REQUIRED[0]) -> Row:
  """A cell with a cosine schedule, which the paper prints only for ImageNet, and possibly one more change."""
  printed = cell(*choice)
  names = dict(name=f'{printed.name}_cosine{name}', title=f'{printed.title}, cosine schedule{title}')
  changes = {**printed.changes, 'optimizer.schedule': 'cosine', **changes}
  return dataclasses.replace(printed, **names, changes=changes, seeds=(0,), note='', further=True)


SWEEP = Sweep(
  title='Understanding Self-supervised Contrastive Learning through Supervised Objectives (Lee 2025), CIFAR-10',
  protocol=(
    'CIFAR-10, ResNet-18, 200 epochs, batch 512, constant learning rate 0.1 unless a row says otherwise, last epoch. '
    'kNN-1: the class of the nearest of the 50,000 training images, backbone features (512). Linear classifier on '
    'the same features: SGD, learning rate 30 with a cosine schedule, momentum 0.9, 90 epochs, batch 256, without '
    'augmentation and with random crops and flips.'
  ),
  columns=(
    Column('knn1', 'kNN-1, %'),
    Column('linear', 'linear, %'),
    Column('finetune', 'linear with crops and flips, %'),
  ),
  common={
    'eval.linear': 'balanced_cifar',
    'eval.finetune': 'linear',
    'eval.k': (1, 200),
    'eval.vote': 'majority',
  },
  rows=(
    *(cell(*choice) for choice in REQUIRED),
    # The paper prints a cosine for ImageNet and for its classifiers, and no schedule for pre-training on CIFAR-10.
    *(cosine('', '', {}, choice) for choice in REQUIRED),
    # In case the printed learning rate is per 256 images, or the losses of the two views are summed, not averaged.
    cosine('_0.2', ', learning rate 0.2', {'optimizer.learning_rate': 0.2}),
    # Batch norm per view.
    cosine('_views_apart', ', views encoded separately', {'method.views_apart': True}),
    *(cell(*choice) for choice in GRID if choice not in REQUIRED),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
