"""Wang & Liu 2021 on CIFAR-10: Table 1, and Tables 1 and 2 of the supplement.

python -m experiments.behaviour.sweep --budget-minutes=25
python -m experiments.behaviour.figures
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments import runner
from experiments.tables import Column, Row, Sweep, on_cifar100

ORDINARY, HARD = 'configs/cifar10.py:memory_bank', 'configs/cifar10.py:memory_bank_hard'
LINEAR, UNIFORMITY, TOLERANCE = 'linear', 'projector/uniformity', 'projector/same_label_similarity'
TAUS = (0.05, 0.07, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Accuracies: supplement Tables 1 and 2. Uniformity and tolerance: Table 1, whose uniformity is −log E exp(−2‖x − y‖²).
ACCURACY = {
  'contrastive': (76.10, 79.75, 81.82, 83.78, 83.27, 83.22, 82.54, 82.97, 82.69, 82.67, 81.97, 82.21),
  'hard': (76.22, 79.20, 80.44, 83.28, 83.63, 84.14, 84.31, 84.60, 84.19, 84.60, 84.45, 84.19),
}
MEASURES = {
  'contrastive': {0.07: (-3.86, 0.04), 0.3: (-3.60, 0.178), 0.7: (-3.17, 0.333), 1.0: (-2.96, 0.372)},
  'hard': {0.07: (-3.88, 0.034), 0.3: (-3.89, 0.0267), 0.7: (-3.87, 0.030), 1.0: (-3.86, 0.030)},
}
REQUIRED = ('contrastive_0.07', 'contrastive_0.3', 'contrastive_1.0', 'hard_0.3')


def published(accuracy: float, measures: Sequence[float] = ()) -> dict[str, float]:
  return {LINEAR: accuracy, **dict(zip((UNIFORMITY, TOLERANCE), measures, strict=False))}


def softmax(loss: str, tau: float) -> Row:
  return Row(
    name=f'{loss}_{tau}',
    title=f'{loss}, τ = {tau}',
    config=HARD if loss == 'hard' else ORDINARY,
    changes={'temperature.tau': tau},
    published=published(ACCURACY[loss][TAUS.index(tau)], MEASURES[loss].get(tau, ())),
    minutes=9 if loss == 'hard' else 6,
    further=f'{loss}_{tau}' not in REQUIRED,
  )


def sampled(tau: float) -> Row:
  """The ordinary loss with as many negatives as the hard loss, drawn at random."""
  changes = {'method.negatives': 4095, 'temperature.tau': tau}
  title = f'contrastive, τ = {tau}, 4,095 random negatives'
  return dataclasses.replace(
    softmax('contrastive', tau), name=f'sampled_{tau}', title=title, changes=changes, further=True
  )


# As τ grows, the contrastive loss approaches the simple loss with weight 1 / N (Eq. 7), with N the number of negatives.
# The paper prints no weight; the authors' code uses this one.
SIMPLE = {'loss.name': 'simple', 'loss.weight': 1 / 49_999, 'temperature.name': 'none'}
HARD_SIMPLE = {'loss.name': 'hard_simple', 'loss.fraction': 0.0819, 'loss.weight': 1 / 4095, 'temperature.name': 'none'}
ROWS = [softmax(loss, tau) for tau in TAUS for loss in ('contrastive', 'hard')]
ROWS += [sampled(tau) for tau in (0.07, 0.3)]
ROWS += [
  Row(
    'simple',
    'simple, weight 1/49,999',
    ORDINARY,
    SIMPLE,
    published=published(74.83, (-1.68, 0.61)),
    minutes=6,
  ),
  Row(
    'hard_simple',
    'hard simple, weight 1/4,095',
    HARD,
    HARD_SIMPLE,
    published=published(84.84, (-3.85, 0.030)),
    minutes=9,
  ),
]
# The CIFAR-100 half of Table 1: accuracy, uniformity, tolerance.
CIFAR100 = {
  'contrastive_0.07': (51.82, -3.86, 0.10),
  'contrastive_0.3': (56.44, -3.60, 0.269),
  'contrastive_0.7': (50.99, -3.18, 0.331),
  'contrastive_1.0': (48.33, -2.96, 0.343),
  'simple': (39.31, -2.12, 0.39),
  'hard_0.07': (50.77, -3.87, 0.088),
  'hard_0.3': (56.55, -3.88, 0.124),
  'hard_0.7': (57.54, -3.87, 0.158),
  'hard_1.0': (56.77, -3.86, 0.172),
  'hard_simple': (55.71, -3.86, 0.174),
}
ROWS += [
  on_cifar100(row, published(CIFAR100[row.name][0], CIFAR100[row.name][1:])) for row in ROWS if row.name in CIFAR100
]
SWEEP = Sweep(
  title='Understanding the Behaviour of Contrastive Loss (Wang & Liu 2021), CIFAR-10',
  protocol=(
    'CIFAR-10 unless a row says CIFAR-100. ResNet-18, memory bank, 200 epochs, last epoch. '
    'Linear classifier on the backbone features (512): SGD, learning rate 30, ×0.2 at epochs 40, 60 and 80 of 100, '
    'no weight decay, no augmentation. Uniformity is log E exp(−2‖x − y‖²) and tolerance is the mean similarity of '
    'images of the same class, both on the embeddings (128) of the test images. The paper prints the uniformity '
    'with the opposite sign.'
  ),
  columns=(Column(LINEAR, 'linear, %'), Column(UNIFORMITY, 'uniformity'), Column(TOLERANCE, 'tolerance', digits=3)),
  rows=sorted(ROWS, key=lambda row: row.further),
  # Local separation (Fig. 8) is measured on all test images.
  common={'eval.linear': 'behaviour', 'eval.view_images': 10_000},
  curves=(
    'separation_mean',
    'separation_std',
    *(f'similarities_{kind}' for kind in ('edges', 'TP', 'FN', 'TN')),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
