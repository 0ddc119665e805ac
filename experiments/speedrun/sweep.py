"""The race to 90.0 % kNN accuracy on CIFAR-10: named attempts, each a recipe on configs/cifar10.py.

  python -m experiments.speedrun.sweep --only=simclr_512                # one attempt, one seed
  python -m experiments.speedrun.sweep --only=simclr_512 --seeds=5      # what counts: five seeds, one after the other
  python -m experiments.speedrun.sweep --only=short_simclr_512,short_byol_256 --side-by-side=2    # a look, no clock

README.md has the rules. Each attempt has a short form, short_NAME, with a quarter of its epochs. Epochs are chosen so
that a run takes about 5 minutes on one H200 (batch 512 trains 43,000 pairs of views per second, batch 128 30,000; about
a minute goes to reading, compiling and evaluating).
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from experiments import runner
from experiments.tables import Column, Row, Sweep

# Nothing that costs time and is not needed: one evaluation, at the end, by kNN alone.
COMMON = {
  'eval.k': (10,),
  'eval.vote': 'majority',
  'eval.flip': True,
  'eval.every_epochs': 0,
  'ema': 0.999,
  'augment.grey': 0.1,
  'data.cache': 'runs/speedrun/images',
  'log.tensorboard': False,
  'checkpoint.every_minutes': 60.0,
}


def sgd(batch_size: int, learning_rate: float, warmup_epochs: float = 5.0) -> dict:
  """The recipe of the 200-epoch baselines, SGD at 0.06 per 128 images and decay 5e-4, with a warm-up."""
  return {
    'batch_size': batch_size,
    'optimizer.learning_rate': learning_rate,
    'optimizer.warmup_epochs': warmup_epochs,
  }


WIDE = {'projector.features': (2048, 256)}  # the SimCLR head of solo-learn's CIFAR recipe
# Multi-crop: a crop of 16 pixels costs a quarter of a full view.
SMALL = {
  'small_crops.number': 4,
  'small_crops.size': 16,
  'small_crops.scale': (0.05, 0.3),
  'augment.crop_scale': (0.3, 1.0),
}
DECAY = {'optimizer.weight_decay': 1e-4}  # with a learning rate of 0.5: Kukleva et al. (2023), batch 512
MOMENTUM = {'method.momentum': 0.99, 'method.final_momentum': 1.0}


def attempt(name: str, title: str, epochs: int, variant: str, *changes: Mapping, **more) -> Row:
  """An attempt of so many epochs on a variant of configs/cifar10.py ('': SimCLR)."""
  merged = {'epochs': epochs}
  for change in changes:
    merged |= change
  config = f'configs/cifar10.py:{variant}' if variant else 'configs/cifar10.py'
  return Row(name, title, config, merged, **{'minutes': 5.0, **more})


def pixels(size: int) -> dict:
  """Smaller views; evaluations see whole images of 32 pixels."""
  return {'augment.size': size}


def short(row: Row) -> Row:
  """A quarter of the epochs, to compare attempts in little time."""
  changes = {**row.changes, 'epochs': row.changes['epochs'] // 4}
  names = dict(name=f'short_{row.name}', title=f'{row.title}, a quarter of the epochs')
  return dataclasses.replace(row, **names, changes=changes, minutes=2.0, further=True)


# The weight of its invariance is 200, where NT-Xent at 0.2 has 1 / 0.2 = 5: a learning rate that is smaller by as much.
EMP_SGD = {'optimizer.name': 'sgd', 'optimizer.learning_rate': 0.003, 'optimizer.weight_decay': 5e-4}
FASTSIAM = {'views': 4, 'method.mean_target': True}
ATTEMPTS = (
  attempt('emp_ssl', 'EMP-SSL, 20 views, batch 100', 18, 'emp_ssl'),
  attempt('emp_ssl_24px', 'EMP-SSL, 20 views of 24 pixels, batch 100', 30, 'emp_ssl', pixels(24)),
  attempt('emp_ssl_16px', 'EMP-SSL, 20 views of 16 pixels, batch 100', 60, 'emp_ssl', pixels(16)),
  attempt('emp_ssl_sgd', 'EMP-SSL, 20 views, batch 100, SGD', 18, 'emp_ssl', EMP_SGD),
  attempt('simclr_512', 'SimCLR, τ = 0.2, batch 512', 190, '', sgd(512, 0.24)),
  attempt(
    'fastsiam_24px', 'FastSiam, batch 128, views of 24 pixels', 120, 'simsiam', FASTSIAM, pixels(24), sgd(128, 0.06)
  ),
  attempt('simclr_24px', 'SimCLR, batch 512, views of 24 pixels', 300, '', pixels(24), sgd(512, 0.24)),
  attempt(
    'byol_4views_24px',
    'BYOL, four views of 24 pixels, mean target, batch 128',
    95,
    'byol',
    FASTSIAM,
    pixels(24),
    MOMENTUM,
    sgd(128, 0.1),
  ),
  attempt('byol_24px', 'BYOL, batch 256, views of 24 pixels', 190, 'byol', pixels(24), MOMENTUM, sgd(256, 0.12)),
  attempt('simclr_4views', 'SimCLR, four views, batch 256', 95, '', {'views': 4}, sgd(256, 0.12)),
  attempt('vicreg_4views', 'VICReg, four views, batch 256', 85, 'vicreg', {'views': 4, 'batch_size': 256}),
  attempt('byol_crops', 'BYOL, two views and four small crops, batch 256', 95, 'byol', SMALL, MOMENTUM, sgd(256, 0.12)),
  attempt('simclr_crops', 'SimCLR, two views and four small crops, batch 256', 120, '', SMALL, sgd(256, 0.12)),
  attempt('fastsiam', 'FastSiam: SimSiam, four views, mean target, batch 128', 90, 'simsiam', FASTSIAM, sgd(128, 0.06)),
  attempt('byol_256', 'BYOL, batch 256', 135, 'byol', MOMENTUM, sgd(256, 0.12)),
  attempt('byol_4views', 'BYOL, four views, mean target, batch 128', 70, 'byol', FASTSIAM, MOMENTUM, sgd(128, 0.1)),
  attempt('dcl_256', 'DCL, τ = 0.1, batch 256', 170, 'dcl', sgd(256, 0.12)),
  attempt(
    'vicreg_8views_20px',
    'VICReg, eight views of 20 pixels, batch 256',
    105,
    'vicreg',
    {'views': 8, 'batch_size': 256, 'augment.crop_scale': (0.2, 1.0)},
    pixels(20),
  ),
  attempt('simclr_wide_head', 'SimCLR, batch 512, head 2048-256', 185, '', sgd(512, 0.24), WIDE),
  attempt('simclr_fast_rate', 'SimCLR, batch 512, learning rate 0.5, decay 1e-4', 190, '', sgd(512, 0.5), DECAY),
  attempt('resnet10', 'SimCLR, batch 512, ResNet-10', 330, '', {'model.stage_sizes': (1, 1, 1, 1)}, sgd(512, 0.24)),
)

SWEEP = Sweep(
  title='The race to 90 % kNN accuracy on CIFAR-10',
  protocol=(
    'CIFAR-10, kNN of the 10,000 test images among the 50,000 training images at the last epoch: 10 neighbours, cosine '
    'similarity, majority vote. Features: backbone of the averaged weights, mean over the image and its mirror image, '
    'and for EMP-SSL over a grid of crops and their mirror images. '
    'Seconds: the whole process on an otherwise idle device, from its start to its end, without a compilation cache; '
    'then the same without the time in the compiler.'
  ),
  columns=(
    Column('knn10', 'kNN-10, %'),
    Column('alone_seconds', 'seconds', 0),
    Column('compiled_seconds', 'without compilation', 0),
    Column('epochs', 'epochs', 0),
  ),
  common=COMMON,
  at_end=False,
  rows=(*ATTEMPTS, *map(short, ATTEMPTS)),
)

if __name__ == '__main__':
  # A run must compile what it runs: no program comes from an earlier one.
  os.environ.setdefault('JAX_ENABLE_COMPILATION_CACHE', 'false')
  runner.main(SWEEP, pathlib.Path(__file__).parent)
