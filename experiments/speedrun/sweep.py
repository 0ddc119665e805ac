"""The race to 90.0 % kNN accuracy on CIFAR-10: named attempts, each a recipe based on configs/cifar10.py.

  python -m experiments.speedrun.sweep --only=simclr_4views_muon              # one attempt, one seed
  python -m experiments.speedrun.sweep --only=simclr_4views_muon --seeds=5    # what counts: five seeds, one by one

README.md has the rules. The numbers of epochs are estimates of what fits into 5 minutes on one H200.
"""

import os
import pathlib
from collections.abc import Mapping

from experiments import runner
from experiments.tables import Column, Row, Sweep

# Settings of all attempts. To save time, there is a single evaluation, at the end, with kNN only.
COMMON = {
  'deterministic': False,
  'eval.k': (10,),
  'eval.vote': 'majority',
  'eval.flip': True,
  'eval.whiten': True,
  'eval.every_epochs': 0,
  'ema': 0.999,
  'augment.size': 24,
  'augment.grey': 0.1,
  'log.tensorboard': False,
  'checkpoint.every_minutes': 60.0,
}


def sgd(batch_size: int, learning_rate: float) -> dict:
  """The recipe of the 200-epoch baselines, SGD at 0.06 per 128 images and decay 5e-4, with a warm-up."""
  return {
    'batch_size': batch_size,
    'optimizer.learning_rate': learning_rate,
    'optimizer.warmup_epochs': 5.0,
  }


def attempt(name: str, title: str, epochs: int, variant: str, *changes: Mapping) -> Row:
  """An attempt of `epochs` epochs with a variant of configs/cifar10.py ('': SimCLR)."""
  merged = {'epochs': epochs}
  for change in changes:
    merged |= change
  config = f'configs/cifar10.py:{variant}' if variant else 'configs/cifar10.py'
  return Row(name, title, config, merged, minutes=5.0)


MOMENTUM = {'method.momentum': 0.99, 'method.final_momentum': 1.0}
FASTSIAM = {'views': 4, 'method.mean_target': True}
ATTEMPTS = (
  attempt('simclr_4views_muon', 'SimCLR, four views, batch 256, Muon', 90, 'muon', {'views': 4, 'batch_size': 256}),
  attempt('simclr_8views_muon', 'SimCLR, eight views, batch 128, Muon', 50, 'muon', {'views': 8}),
  attempt('simclr_muon', 'SimCLR, batch 512, Muon', 200, 'muon', {'batch_size': 512}),
  attempt('byol_muon', 'BYOL, batch 256, Muon', 150, 'byol,muon', MOMENTUM, {'batch_size': 256}),
  attempt('byol_4views_muon', 'BYOL, four views, batch 128, Muon', 80, 'byol,muon', FASTSIAM, MOMENTUM),
  attempt('simclr', 'SimCLR, batch 512, SGD', 300, '', sgd(512, 0.24)),
  attempt('fastsiam', 'FastSiam, batch 128, SGD', 120, 'simsiam', FASTSIAM, sgd(128, 0.06)),
  attempt('emp_ssl', 'EMP-SSL, 20 views, batch 100, AdamW', 24, 'emp_ssl'),
)

SWEEP = Sweep(
  title='The race to 90 % kNN accuracy on CIFAR-10',
  protocol=(
    'CIFAR-10, ResNet-18 trained on views of 24 pixels. kNN of the 10,000 test images among the 50,000 training images '
    'at the last epoch: 10 neighbors, cosine similarity, majority vote. Features: backbone of the averaged weights, '
    'mean over the image and its mirror image (EMP-SSL: over a grid of crops and their mirror images), whitened by the '
    'training images or not. Seconds: the whole process on an otherwise idle device, from its start to its end, '
    'without a compilation cache; then the same without the time in the compiler.'
  ),
  columns=(
    Column('knn10_white', 'kNN-10, whitened, %'),
    Column('knn10', 'kNN-10, not whitened, %'),
    Column('alone_seconds', 'seconds', 0),
    Column('compiled_seconds', 'without compilation', 0),
    Column('epochs', 'epochs', 0),
  ),
  common=COMMON,
  at_end=False,
  rows=ATTEMPTS,
)

if __name__ == '__main__':
  # Each run must compile its own programs, so the cache of earlier runs is disabled.
  os.environ.setdefault('JAX_ENABLE_COMPILATION_CACHE', 'false')
  runner.main(SWEEP, pathlib.Path(__file__).parent)
