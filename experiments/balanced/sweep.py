"""The balanced contrastive loss (Lee 2025) on CIFAR-10: Table 4, Figures 5 and 6, and the paper's ImageNet experiments.

python -m experiments.balanced.sweep --budget-minutes=25
python -m experiments.balanced.figures
"""

import dataclasses
import itertools
import pathlib

from experiments import runner
from experiments.tables import Column, Row, Sweep

CONFIG = 'configs/cifar10.py:balanced'
LOSSES = {'balanced': 'balanced', 'generalized_nt_xent': 'generalized NT-Xent'}
# The paper does not say whether its classifier sees crops and flips, so we compare both variants with its number.
# Figure 5 gives no numbers.
PUBLISHED = {('balanced', 2, 4): {'knn1': 80.32, 'linear': 86.08, 'finetune': 86.08}}
REQUIRED = (('balanced', 2, 4), ('balanced', 4, 2), ('balanced', 1, 1), ('generalized_nt_xent', 2, 2))
VALUES = (1, 2, 4, 8)  # of α and λ
GRID = [(loss, *pair) for loss in LOSSES for pair in itertools.product(VALUES, repeat=2)]
# NT-Xent with the paper's temperature for ImageNet, for its ImageNet experiments (Tables 1, 2 and 5, Figure 3).
NT_XENT = {'loss.name': 'info_nce', 'temperature.name': 'constant', 'temperature.tau': 0.5}
GAPS = ('projector/attracting_gap', 'projector/repelling_gap')
SUBSET = 12_406  # images of CIFAR-10-LT


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
    shows=('Table 4', 'Figure 5') if (loss, alpha, lam) in PUBLISHED else ('Figure 5',),
  )


def cosine(name: str, title: str, changes: dict, choice: tuple[str, int, int] = REQUIRED[0]) -> Row:
  """A cell with a cosine schedule, which the paper states only for ImageNet, and optional other changes."""
  printed = cell(*choice)
  names = dict(name=f'{printed.name}_cosine{name}', title=f'{printed.title}, cosine schedule{title}')
  changes = {**printed.changes, 'optimizer.schedule': 'cosine', **changes}
  shows = tuple(item for item in printed.shows if item == 'Table 4')
  return dataclasses.replace(printed, **names, changes=changes, seeds=(0,), note='', further=True, shows=shows)


def bounds() -> Row:
  """Figure 6: gaps every ten epochs on all test images, with ten views per query. The bank is the training images."""
  changes = {'eval.every_epochs': 10, 'eval.measures': True, 'eval.views': 11, 'eval.view_images': 10_000}
  row = cell('balanced', 2, 4)
  names = dict(name='bounds', title=f'{row.title}, gaps of the bounds every 10 epochs', note='')
  shown = dict(published={}, seeds=(0,), minutes=12, further=True, shows=('Figure 6',), history=GAPS)
  return dataclasses.replace(row, **names, changes={**row.changes, **changes}, **shown)


def nt_xent(name: str, title: str, changes: dict, *items: str) -> Row:
  names = (f'nt_xent{name}', f'NT-Xent, τ = 0.5{title}', CONFIG)
  return Row(*names, {**NT_XENT, **changes}, minutes=6, further=True, shows=items)


def on_subset(row: Row, rule: str, item: str) -> Row:
  """A row with 12,406 training images, in classes of equal size or with a long tail."""
  imbalance = {'long_tail': {'imbalance.name': 'exponential_tail', 'imbalance.ratio': 0.01}}
  imbalance['uniform'] = {'imbalance.name': 'uniform', 'imbalance.total': SUBSET}
  title = f'{row.title}, {rule.replace("_", "-")} classes, 12,406 images'
  names = dict(name=f'{row.name}_{rule}', title=title, changes={**row.changes, **imbalance[rule]}, minutes=3)
  return dataclasses.replace(row, **names, further=True, shows=(item,), images=SUBSET)


# The paper's ImageNet experiments (experiments/balanced_imagenet), on CIFAR-10.
INSTEAD = (
  nt_xent('', '', {}, 'Table 1', 'Figure 3'),
  nt_xent('_dot', ', dot product, not normalized', {'method.similarity': 'dot'}, 'Table 1'),
  nt_xent('_euclidean', ', negative distance, not normalized', {'method.similarity': 'euclidean'}, 'Table 1'),
  *(on_subset(nt_xent('', '', {}), rule, 'Table 2') for rule in ('uniform', 'long_tail')),
  *(on_subset(cell('balanced', 2, 1), rule, 'Table 5') for rule in ('uniform', 'long_tail')),
  *(
    nt_xent(f'_{name}', f', {title}', {'augment.name': f'balanced_cifar_{name}'}, 'Figure 3')
    for name, title in (
      ('no_color', 'without color distortion'),
      ('cutout', 'with cutout'),
      ('rotation', 'with rotation'),
      ('noise', 'with noise'),
    )
  ),
)
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
  pictured=('balanced_2_4', 'balanced_4_2', 'generalized_nt_xent_2_2', 'balanced_1_1', 'balanced_2_4_cosine'),
  common={
    'eval.linear': 'balanced_cifar',
    'eval.finetune': 'linear',
    'eval.k': (1, 200),
    'eval.vote': 'majority',
  },
  rows=(
    *(cell(*choice) for choice in REQUIRED),
    # The paper states a cosine schedule for ImageNet and for its classifiers, but none for pretraining on CIFAR-10.
    *(cosine('', '', {}, choice) for choice in REQUIRED),
    # In case the published learning rate is per 256 images, or the losses of the two views are summed, not averaged.
    cosine('_0.2', ', learning rate 0.2', {'optimizer.learning_rate': 0.2}),
    # Batch norm per view.
    cosine('_views_apart', ', views encoded separately', {'method.views_apart': True}),
    *(cell(*choice) for choice in GRID if choice not in REQUIRED),
    bounds(),
    *INSTEAD,
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
