"""Wang & Liu 2021 on CIFAR-10, CIFAR-100, SVHN and ImageNet-100: Table 1, Tables 1 and 2 of the supplement, figures.

python -m experiments.behaviour.sweep --budget-minutes=25
python -m experiments.behaviour.figures
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from experiments import runner
from experiments.tables import Column, Row, Sweep

LINEAR, UNIFORMITY, TOLERANCE = 'linear', 'projector/uniformity', 'projector/same_label_similarity'
TAUS = (0.05, 0.07, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class Data:
  """A dataset and its published numbers.

  Accuracies are those of the supplement's Tables 1 and 2. Where Table 1 of the paper differs, both numbers form a
  range. Uniformity and tolerance are those of Table 1, but its uniformity, −log E exp(−2‖x − y‖²), has the opposite
  sign.
  """

  name: str  # prefix of the names of its rows; '' for CIFAR-10
  title: str
  config: str
  images: int  # number of training images
  minutes: tuple[float, float]  # estimates for a run with the ordinary loss and with the hard loss
  accuracy: dict[str, Sequence[float | tuple[float, float]]]  # by temperature
  measures: dict[str, Sequence[tuple[float, float]]]  # uniformity and tolerance at REPRESENTATIVE temperatures
  simple: dict[str, tuple[float, float, float]]  # accuracy, uniformity, tolerance

  @property
  def prefix(self) -> str:
    return f'{self.name}_' if self.name else ''

  @property
  def hard_share(self) -> float:
    """The share of the bank that is `HARD` negatives."""
    return math.floor(1e5 * HARD / self.images) / 1e5


HARD = 4095  # hard negatives of the hard simple loss (sec. 5.5)
REPRESENTATIVE = (0.07, 0.3, 0.7, 1.0)
CIFAR10 = Data(
  name='',
  title='',
  config='configs/cifar10.py',
  images=50_000,
  minutes=(6, 9),
  accuracy={
    'contrastive': (76.10, 79.75, 81.82, 83.78, 83.27, 83.22, 82.54, 82.97, 82.69, 82.67, 81.97, 82.21),
    'hard': (76.22, 79.20, 80.44, 83.28, 83.63, 84.14, 84.31, 84.60, 84.19, 84.60, 84.45, 84.19),
  },
  measures={
    'contrastive': ((-3.86, 0.04), (-3.60, 0.178), (-3.17, 0.333), (-2.96, 0.372)),
    'hard': ((-3.88, 0.034), (-3.89, 0.0267), (-3.87, 0.030), (-3.86, 0.030)),
  },
  simple={'simple': (74.83, -1.68, 0.61), 'hard_simple': (84.84, -3.85, 0.030)},
)
CIFAR100 = Data(
  name='cifar100',
  title=', CIFAR-100',
  config='configs/cifar100.py',
  images=50_000,
  minutes=(6, 9),
  accuracy={
    'contrastive': (49.80, 51.82, 52.46, 56.05, 56.44, 55.47, 54.17, 53.05, 50.99, 50.08, 50.21, 48.33),
    'hard': (49.21, 50.77, 51.91, 55.61, 56.55, 55.66, 57.37, 57.17, 57.54, 57.15, 56.53, 56.77),
  },
  measures={
    'contrastive': ((-3.86, 0.10), (-3.60, 0.269), (-3.18, 0.331), (-2.96, 0.343)),
    'hard': ((-3.87, 0.088), (-3.88, 0.124), (-3.87, 0.158), (-3.86, 0.172)),
  },
  simple={'simple': (39.31, -2.12, 0.39), 'hard_simple': (55.71, -3.86, 0.174)},
)
SVHN = Data(
  name='svhn',
  title=', SVHN',
  config='configs/svhn.py',
  images=73_257,
  minutes=(9, 14),
  accuracy={
    'contrastive': (88.96, 92.55, 94.21, 95.46, 95.47, 95.36, 94.66, 94.47, 94.17, 93.22, 92.66, 92.07),
    'hard': (89.07, 91.82, 93.37, 94.58, 94.79, 94.62, 94.93, 95.06, 95.02, 95.03, 95.08, 95.26),
  },
  measures={
    'contrastive': ((-3.88, 0.032), (-3.65, 0.137), (-3.27, 0.186), (-3.05, 0.197)),
    'hard': ((-3.89, 0.025), (-3.91, 0.021), (-3.90, 0.021), (-3.88, 0.023)),
  },
  simple={'simple': (70.83, -1.50, 0.074), 'hard_simple': (94.99, -3.85, 0.026)},
)
IMAGENET100 = Data(
  name='imagenet100',
  title=', ImageNet-100',
  config='configs/imagenet100.py',
  images=126_689,
  minutes=(300, 330),
  accuracy={
    'contrastive': (63.91, 71.53, 74.59, 75.41, 75.10, 72.98, 71.10, 70.47, 69.03, 67.91, 65.93, (63.57, 65.49)),
    'hard': (61.54, 68.33, 72.10, 74.53, 74.21, 75.04, 74.84, 74.46, 74.70, 74.28, 74.74, (73.78, 74.28)),
  },
  measures={
    'contrastive': ((-3.917, 0.093), (-3.693, 0.380), (-3.323, 0.427), (-3.08, 0.456)),
    'hard': ((-3.929, 0.067), (-3.932, 0.096), (-3.927, 0.121), (-3.923, 0.134)),
  },
  simple={'simple': (48.09, -1.742, 0.528), 'hard_simple': (74.31, -3.917, 0.157)},
)
DATA = (CIFAR10, CIFAR100, SVHN, IMAGENET100)
REQUIRED = tuple(f'{loss}_{tau}' for loss in ('contrastive', 'hard') for tau in (0.07, 0.3, 1.0))
# Figures that show a loss at all temperatures: local separation, per dataset; uniformity and tolerance (MEASURES).
SEPARATION = {
  ('contrastive', ''): 'Supplement, Figure 1',
  ('contrastive', 'cifar100'): 'Figure 8',
  ('contrastive', 'svhn'): 'Supplement, Figure 2',
  ('contrastive', 'imagenet100'): 'Supplement, Figure 3',
  ('hard', ''): 'Supplement, Figure 4',
  ('hard', 'cifar100'): 'Supplement, Figure 5',
  ('hard', 'svhn'): 'Supplement, Figure 6',
  ('hard', 'imagenet100'): 'Supplement, Figure 7',
}
MEASURES = {'contrastive': ('Figure 4', 'Figure 5'), 'hard': ('Figure 6', 'Figure 7')}  # not for ImageNet-100


def published(accuracy: float | tuple[float, float], measures: Sequence[float] = ()) -> dict:
  return {LINEAR: accuracy, **dict(zip((UNIFORMITY, TOLERANCE), measures, strict=False))}


def config(data: Data, loss: str) -> str:
  return f'{data.config}:memory_bank_hard' if 'hard' in loss else f'{data.config}:memory_bank'


def minutes(data: Data, loss: str) -> float:
  return data.minutes['hard' in loss]


def softmax(data: Data, loss: str, tau: float) -> Row:
  """The contrastive loss (Eq. 1), or the hard one (Eq. 9)."""
  numbers = dict(zip(REPRESENTATIVE, data.measures[loss], strict=True))
  shows = [f'Supplement, Table {2 if loss == "hard" else 1}', 'Figure 9', SEPARATION[loss, data.name]]
  shows += MEASURES[loss] if data is not IMAGENET100 else ()
  shows += ['Table 1'] if tau in REPRESENTATIVE else []
  shows += ['Figure 2'] if (data, loss) == (CIFAR10, 'contrastive') and tau in (0.07, 0.2) else []
  name = f'{data.prefix}{loss}_{tau}'
  return Row(
    name=name,
    title=f'{loss}, τ = {tau}{data.title}',
    config=config(data, loss),
    changes={'temperature.tau': tau},
    published=published(data.accuracy[loss][TAUS.index(tau)], numbers.get(tau, ())),
    minutes=minutes(data, loss),
    further=name not in REQUIRED,
    shows=tuple(shows),
    images=data.images,
  )


def without_softmax(data: Data, name: str) -> Row:
  """The simple loss (Eq. 3), with all negatives or with the hard ones.

  As τ grows, the contrastive loss approaches the simple loss with weight 1 / N (Eq. 7), with N the number of negatives.
  The paper does not state the weight; the authors' code uses this one.
  """
  negatives = data.images - 1 if name == 'simple' else HARD
  hard = {'loss.fraction': data.hard_share} if name == 'hard_simple' else {}
  changes = {'loss.name': name, **hard, 'loss.weight': 1 / negatives, 'temperature.name': 'none'}
  accuracy, *measures = data.simple[name]
  return Row(
    name=f'{data.prefix}{name}',
    title=f'{name.replace("_", " ")}, weight 1/{negatives:,}{data.title}',
    config=config(data, name),
    changes=changes,
    published=published(accuracy, measures),
    minutes=minutes(data, name),
    further=bool(data.name),
    shows=('Table 1',),
    images=data.images,
  )


def sampled(tau: float) -> Row:
  """The ordinary loss with as many negatives as the hard loss, drawn at random."""
  changes = {'method.negatives': HARD, 'temperature.tau': tau}
  names = dict(name=f'sampled_{tau}', title=f'contrastive, τ = {tau}, 4,095 random negatives')
  return dataclasses.replace(softmax(CIFAR10, 'contrastive', tau), **names, changes=changes, further=True, shows=())


def triplet(data: Data) -> Row:
  """The limit of small temperatures, max(s_max − s, 0) / τ (Eq. 6), from which "the model can not learn any useful
  information" (sec. 3.2). Its factor 1/τ diverges; our triplet loss has the factor 2 instead."""
  changes = {'loss.name': 'triplet', 'loss.margin': 0.0, 'temperature.name': 'none'}
  title = f'triplet with margin 0 (τ → 0){data.title}'
  return Row(
    name=f'{data.prefix}triplet',
    title=title,
    config=config(data, 'contrastive'),
    changes=changes,
    minutes=minutes(data, 'contrastive'),
    further=True,
    shows=('Equation 6',),
    images=data.images,
  )


def rows(data: Data) -> list[Row]:
  found = [softmax(data, loss, tau) for tau in TAUS for loss in ('contrastive', 'hard')]
  return [*found, *(without_softmax(data, name) for name in data.simple), triplet(data)]


# The paper states 4,095 hard negatives, but also 3.15 % of SVHN, which are 2,308. This row has 4,095.
SVHN_4095 = dataclasses.replace(
  softmax(SVHN, 'hard', 0.3),
  name='svhn_hard_0.3_4095',
  title='hard, τ = 0.3, 4,095 hard negatives, SVHN',
  changes={'temperature.tau': 0.3, 'loss.fraction': SVHN.hard_share},
  shows=('Table 1',),
)
ROWS = [*rows(CIFAR10), *(sampled(tau) for tau in (0.07, 0.3)), *rows(CIFAR100), *rows(SVHN), SVHN_4095]
ROWS += rows(IMAGENET100)
SWEEP = Sweep(
  title='Understanding the Behaviour of Contrastive Loss (Wang & Liu 2021)',
  protocol=(
    'CIFAR-10 unless a row names another set. ResNet-18 (ImageNet-100: ResNet-50), memory bank, 200 epochs, last '
    'epoch. Linear classifier on the backbone features: SGD, learning rate 30, ×0.2 at epochs 40, 60 and 80 of 100, '
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
