"""CACR (Zheng et al. 2023) on CIFAR-10, CIFAR-100 and STL-10: Tables 2, 3, 8 to 13 and 20, Figures 3 to 10.

  python -m experiments.cacr.sweep --budget-minutes=25

The rows on ImageNet are in experiments/cacr_imagenet.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from experiments import runner
from experiments.tables import Column, Row, Sweep, on_cifar100

K1, K4, CMC = (f'configs/cifar10.py:{variant}' for variant in ('cacr_k1', 'cacr', 'cmc'))
LINEAR = 'finetune'  # with crops and flips
Accuracy = float | tuple[float, float]
# App. C.1: the overrides that turn CACR with K = 1 into the baselines, all with 768 images per step.
CL = {'method.by_view_pair': False, 'loss.name': 'info_nce', 'temperature.name': 'constant', 'temperature.tau': 0.19}
AU_CL = {'method.by_view_pair': False, 'loss.name': 'align_uniform', 'loss.t': 2.0}
HN_CL = {
  'method.by_view_pair': False,
  'loss.name': 'hard_negative',
  'loss.beta': 1.0,
  'loss.tau_plus': 0.1,  # from the code of the HCL authors, whose other values equal the published ones
  'temperature.name': 'constant',
  'temperature.tau': 0.5,
}
APART = {'method.views_apart': True}
LONG = {'epochs': 400, 'optimizer.milestones': (310, 340, 370)}  # Table 3
UNIFORM = {'loss.positive_weights': 'uniform', 'loss.negative_weights': 'uniform'}
SETS = ('cifar10', 'cifar100', 'stl10')


def k1(name: str, title: str, accuracy: Accuracy | None, changes: dict | None = None, **more) -> Row:
  published = {} if accuracy is None else {LINEAR: accuracy}
  return Row(name, title, K1, changes or {}, published=published, **{'minutes': 6, **more})


def k4(name: str, title: str, accuracy: Accuracy | None, changes: dict | None = None, **more) -> Row:
  return dataclasses.replace(k1(name, title, accuracy, changes, **{'minutes': 9, **more}), config=K4)


def on(data: str, row: Row, accuracy: Accuracy | None, shows: Sequence[str] = ()) -> Row:
  """A row on a dataset, with low priority. `shows`: its tables and figures, by default those of `row`."""
  published, tables = {} if accuracy is None else {LINEAR: accuracy}, tuple(shows) or row.shows
  if data == 'cifar10':
    return dataclasses.replace(row, published=published, further=True, shows=tables)
  if data == 'cifar100':
    return dataclasses.replace(on_cifar100(row, published), shows=tables)
  names = dict(name=f'stl10_{row.name}', title=f'{row.title}, STL-10', note='')
  file = row.config.replace('cifar10.py', 'stl10.py')
  slower = 8  # twice the images, four times the pixels
  more = dict(
    config=file,
    seeds=(0,),
    published=published,
    minutes=slower * row.minutes,
    further=True,
    shows=tables,
    images=105_000,
  )
  return dataclasses.replace(row, **names, **more)


TABLE_2 = (
  k1('cl', 'CL, τ = 0.19', 83.47, CL, shows=('Table 2', 'Table 8', 'Figure 7', 'Figure 8')),
  k4(
    'cacr_k4',
    'CACR, K = 4',
    (86.48, 86.54),
    note='Tables 10 and 2',
    shows=('Table 2', 'Table 3', 'Table 8', 'Table 10', 'Table 12', 'Table 13', 'Figure 6', 'Figure 8', 'Figure 9'),
  ),
  k1(
    'cacr_k1',
    'CACR, K = 1',
    83.73,
    shows=('Table 2', 'Table 8', 'Table 13', 'Table 20', 'Figure 7', 'Figure 8', 'Figure 9'),
  ),
  Row(
    'cmc',
    'CMC, K = 4, τ = 0.19',
    CMC,
    published={LINEAR: 85.54},
    minutes=9,
    note='the paper prints τ only for ImageNet: 0.07',
    shows=('Table 2', 'Table 3', 'Table 8', 'Figure 8'),
  ),
  k1('hn_cl', 'HN-CL, τ = 0.5, β = 1', 83.67, HN_CL, shows=('Table 2', 'Table 8', 'Figure 8')),
  k4('uaur', 'UAUR: both weights uniform', 77.17, UNIFORM, shows=('Table 11',)),
  k1('au_cl', 'AU-CL, t = 2', (83.39, 83.49), AU_CL, note='Tables 8 and 2', shows=('Table 2', 'Table 8', 'Figure 8')),
)
MAIN = {row.name: row for row in TABLE_2}
METHODS = ('cl', 'au_cl', 'hn_cl', 'cacr_k1', 'cmc', 'cacr_k4')  # in the order of the paper's tables


def numbers(*accuracies: Accuracy) -> dict[str, Accuracy]:
  return dict(zip(METHODS, accuracies, strict=True))


TABLE_8 = {
  'cifar100': numbers(55.41, 55.31, 55.87, 56.52, 58.64, (59.41, 59.51)),  # also in Table 2; 59.51: Table 11
  'stl10': numbers(83.89, 84.43, 83.27, 84.51, 84.50, 85.59),
}
TABLE_9 = {
  'cifar10': numbers(88.70, 88.63, 89.02, 90.97, 90.05, 92.89),
  'cifar100': numbers(62.00, 62.57, 62.96, 62.98, 65.19, 66.52),
  'stl10': numbers(84.60, 83.81, 84.29, 88.42, 91.40, 93.04),
}
# 400 epochs.
TABLE_3 = {
  'cifar10': dict(cl=83.61, au_cl=83.57, hn_cl=83.72, cacr_k1=83.86),
  'cifar100': dict(cl=55.41, au_cl=56.07, hn_cl=55.80, cacr_k1=56.41),
  'stl10': dict(cl=83.49, au_cl=83.43, hn_cl=82.41, cacr_k1=84.56),
}
VALUES = (0.5, 0.7, 0.9, 1.0, 2.0, 3.0)
TABLE_12 = {  # t_pos, K = 4
  'cifar10': (86.07, 85.78, 85.90, 86.54, 84.85, 84.76),
  'cifar100': (59.47, 59.61, 59.41, 59.41, 57.82, 57.55),
  'stl10': (85.90, 85.91, 85.81, 85.59, 85.65, 85.14),
}
TABLE_13 = {  # t_neg
  'cacr_k1': {
    'cifar10': (81.66, 82.40, 83.07, 82.74, 83.73, 83.11),
    'cifar100': (51.42, 52.81, 53.36, 54.20, 56.21, 56.52),
    'stl10': (80.37, 81.47, 84.46, 82.16, 84.21, 84.51),
  },
  'cacr_k4': {
    'cifar10': (85.67, 86.19, 86.54, 86.41, 85.94, 85.69),
    'cifar100': (58.17, 58.63, 59.37, 59.35, 59.41, 59.31),
    'stl10': (83.81, 84.42, 84.71, 85.25, 85.59, 85.41),
  },
}
# The t_neg of the main rows (C.1), which also serve as the ablations at these values.
CHOSEN = {'cacr_k1': dict(cifar10=2.0, cifar100=3.0, stl10=3.0), 'cacr_k4': dict(cifar10=0.9, cifar100=2.0, stl10=2.0)}
# Table 2, (CIFAR-10, CIFAR-100): pretrained on imbalanced images. Classifiers see all images, as in the authors' code.
IMBALANCED = {
  'linear': dict(
    cl=(79.88, 52.29),
    au_cl=(80.25, 52.74),
    hn_cl=(80.51, 52.72),
    cacr_k1=(80.46, 54.12),
    cmc=(82.20, 55.38),
    cacr_k4=(83.62, 56.91),
  ),
  'exponential': dict(
    cl=(71.74, 43.29),
    au_cl=(71.62, 44.38),
    hn_cl=(72.74, 45.13),
    cacr_k1=(73.02, 46.59),
    cmc=(74.77, 48.87),
    cacr_k4=(75.89, 50.17),
  ),
}
# Table 9 follows Robinson et al. 2021: the encoder, projector, views, optimizer and τ are those of their code. The
# batch size is 256 or, with four positives, 64 by the rule of sec. 5. STL-10 has 64 pixels here, crops of 32 there.
# Their Gaussians of 0.1 to 2 pixels are cut to a kernel of three, whose standard deviation is 0.6 on average and 0.8 at
# most.
RESNET50 = {
  'model.name': 'resnet50_cifar',
  'projector.name': 'moco',
  'projector.features': (512, 128),
  'projector.batch_norm': 'hidden',
  'augment.name': 'dystress_cifar',
  'augment.blur': 0.5,
  'augment.blur_sigma': (0.4, 0.8),
  'epochs': 400,
  'optimizer.name': 'adamw',
  'optimizer.learning_rate': 1e-3,
  'optimizer.scaling': 'none',
  'optimizer.schedule': 'constant',
  'optimizer.weight_decay': 1e-6,
}
# Figures 3 to 5 and 10: the metrics that are computed every ten epochs, and the config keys that enable them.
ENTROPY = 'projector/conditional_entropy'
FOLLOWED = {'linear': ('eval.linear_during',), ENTROPY: ('eval.measures',)}


def standardized(row: Row) -> Row:
  """A row whose classifier sees centered and scaled features; the authors' code uses them as they are."""
  names = dict(name=f'{row.name}_standardized', title=f'{row.title}, standardized features', shows=())
  return dataclasses.replace(row, **names, changes={**row.changes, 'eval.linear': 'cacr_small'}, further=True)


def changed(row: Row, suffix: str, title: str, changes: Mapping, **more) -> Row:
  """A row with other settings and low priority. It keeps the tables and figures of `row` unless `more` has `shows`."""
  names = dict(name=f'{row.name}_{suffix}', title=f'{row.title}, {title}')
  return dataclasses.replace(row, **names, changes={**row.changes, **changes}, **{'further': True, 'note': '', **more})


def imbalanced(rule: str, name: str, accuracies: tuple[float, float]) -> tuple[Row, Row]:
  """A row of Table 2 with imbalanced training images, on CIFAR-10 and on CIFAR-100."""
  row = MAIN[name]
  names = dict(name=f'{name}_{rule}', title=f'{row.title}, {rule} imbalance', config=f'{row.config},{rule}_imbalance')
  minutes = {'linear': 5, 'exponential': 3}[rule]
  ten, hundred = ({LINEAR: accuracy} for accuracy in accuracies)
  row = dataclasses.replace(row, **names, published=ten, minutes=minutes, note='', further=True, shows=('Table 2',))
  return row, on_cifar100(row, hundred)


def ablation(data: str, name: str, key: str, table: str, accuracies: Sequence[float], chosen: float) -> list[Row]:
  """The rows of Table 12 or 13, except those that other parts of the sweep already have."""
  also = lambda t: ('Table 20',) if (name, key, t) == ('cacr_k1', 't_neg', 2.0) else ()
  return [
    on(data, changed(MAIN[name], f'{key}_{t}', f'{key} = {t}', {f'loss.{key}': t}), accuracy, (table, *also(t)))
    for t, accuracy in zip(VALUES, accuracies, strict=True)
    # The second condition excludes a row of Table 11, below.
    if t != chosen and (data, name, key, t) != ('cifar10', 'cacr_k4', 't_neg', 2.0)
  ]


def elsewhere(data: str, name: str) -> Row:
  """A row of Table 8 on CIFAR-100 or STL-10. It also serves the ablations at their default values."""
  more = {'cacr_k1': ['Table 13'], 'cacr_k4': ['Table 11', 'Table 12', 'Table 13', 'Table 20']}.get(name, [])
  shows = ['Table 8', 'Figure 8', *more, *(['Table 3'] if name in ('cmc', 'cacr_k4') else [])]
  if data == 'cifar100':
    shows += ['Table 2', *(['Figure 9'] if name in ('cacr_k1', 'cacr_k4') else [])]
  return on(data, MAIN[name], TABLE_8[data][name], shows)


def resnet50(data: str, name: str, accuracy: Accuracy) -> Row:
  four = name in ('cmc', 'cacr_k4')
  taus = {'temperature.tau': 0.5} if name in ('cl', 'cmc') else {}
  changes = {**RESNET50, 'batch_size': 64 if four else 256, **taus}
  title = MAIN[name].title.replace('0.19', '0.5')
  row = dataclasses.replace(changed(MAIN[name], 'resnet50', 'ResNet-50', changes), title=f'{title}, ResNet-50')
  return on(data, dataclasses.replace(row, minutes=240 if four else 150), accuracy, ('Table 9',))


def batches(data: str, name: str) -> list[Row]:
  """Figure 8: other batch sizes, and therefore numbers of negatives."""
  own = 128 if name in ('cmc', 'cacr_k4') else 768
  of = lambda n: changed(MAIN[name], f'batch_{n}', f'batch {n}', {'batch_size': n})
  return [on(data, of(n), None, ('Figure 8',)) for n in (64, 128, 256, 512, 768) if n != own]


def positives(data: str, number: int) -> Row:
  """Figure 9: other numbers of positives."""
  row = k4(f'cacr_k{number}', f'CACR, K = {number}', None, {'views': number + 1}, minutes=2 * (number + 1))
  return on(data, row, None, ('Figure 9',))


def curve(row: Row, history: Sequence[str], shows: Sequence[str]) -> Row:
  """A row whose metrics are computed every ten epochs."""
  names = dict(name=f'{row.name}_curve', title=f'{row.title}, every 10 epochs', note='', published={})
  changes = {'eval.every_epochs': 10, **{key: True for name in history for key in FOLLOWED[name]}}
  more = dict(minutes=1.5 * row.minutes, further=True, history=tuple(history), shows=tuple(shows))
  return dataclasses.replace(row, **names, changes={**row.changes, **changes}, **more)


def curves() -> list[Row]:
  """Figure 10 (three datasets), Figures 3 and 4 (also linear imbalance), Figure 5 (exponential imbalance)."""
  found, both = [], tuple(FOLLOWED)
  for name in METHODS:
    for data, shows in (('cifar10', ('Figure 3', 'Figure 10')), ('cifar100', ('Figure 4', 'Figure 10'))):
      found.append(on(data, curve(MAIN[name], both, shows), None))
    found.append(on('stl10', curve(MAIN[name], ('linear',), ('Figure 10',)), None))
    for rule, shows in (('linear', ('Figure 3', 'Figure 4')), ('exponential', ('Figure 5', 'Figure 5'))):
      for row, figure in zip(imbalanced(rule, name, IMBALANCED[rule][name]), shows, strict=True):
        found.append(curve(row, (ENTROPY,), (figure,)))
  return found


def early(name: str, epochs: int) -> Row:
  """Figure 7: the same training, stopped early; the learning rate is constant until epoch 155."""
  title = f'after {epochs} epoch{"s" * (epochs > 1)}'
  more = dict(minutes=1 + epochs / 30, published={}, shows=('Figure 7',))
  return changed(MAIN[name], f'epoch_{epochs}', title, {'epochs': epochs}, **more)


TABLE_11 = (
  (MAIN['uaur'], 77.17, 44.24, 71.88),
  (
    k4(
      'without_positive_weights',
      'positive weights uniform, t_neg = 2',
      None,
      {'loss.positive_weights': 'uniform', 'loss.t_neg': 2.0},
    ),
    *(85.22, 58.74, 85.06),
  ),
  (
    k4('without_negative_weights', 'negative weights uniform', None, {'loss.negative_weights': 'uniform'}),
    *(78.49, 47.88, 72.94),
  ),
)
RBF = {'loss.cost': 'rbf', 'loss.t_neg': 2.0}
# The margin form of B.5, for which the paper has no number. Its hinge is not separable into view pairs.
MARGIN = {'method.by_view_pair': False, 'loss.name': 'cacr_margin', 'loss.margin': 1.0, 'loss.t_neg': 0.9}

SWEEP = Sweep(
  title='Contrastive Attraction and Contrastive Repulsion for Representation Learning (CACR), CIFAR and STL-10',
  protocol=(
    'CIFAR-10 unless a row says CIFAR-100 or STL-10. Small AlexNet, 200 epochs, last epoch; '
    '768 images per step with one positive, 128 with four. '
    'Linear classifier on the fc7 features (4,096), used as they are unless a row says standardized: Adam, learning '
    'rate 1e-3, β 0.5 and 0.999, ×0.2 at epochs 60 and 80 of 100, batch 128, with random crops (0.2 to 1 of the area) '
    'and flips, and again without them. kNN: the same features, 200 neighbors, votes weighted by exp(s/0.1).'
  ),
  columns=(
    Column(LINEAR, 'linear, %'),
    Column('linear', 'linear without augmentation, %'),
    Column('knn200', 'kNN-200, %'),
  ),
  common={'eval.linear': 'cacr_small_as_is', 'eval.finetune': 'linear'},
  pictured=('cl', 'au_cl', 'hn_cl', 'cacr_k1', 'cmc', 'cacr_k4', 'uaur'),
  rows=(
    *TABLE_2,
    *(standardized(row) for row in TABLE_2),
    # Batch norm per view, as in the authors' code.
    k1('cacr_k1_views_apart', 'CACR, K = 1, views encoded separately', 83.73, APART, further=True),
    k4('cacr_k4_views_apart', 'CACR, K = 4, views encoded separately', (86.48, 86.54), APART, further=True),
    # Table 11 uses t_neg = 2: its CACR, 85.94, is that of Table 13 at t_neg = 2.
    k4(
      'cacr_k4_t_neg_2',
      'CACR, K = 4, t_neg = 2',
      85.94,
      {'loss.t_neg': 2.0},
      further=True,
      shows=('Table 11', 'Table 13', 'Table 20'),
    ),
    *(
      on(data, row, accuracy, ('Table 11',))
      for row, *accuracies in TABLE_11
      for data, accuracy in zip(SETS, accuracies, strict=True)
      if (row.name, data) != ('uaur', 'cifar10')  # already in TABLE_2
    ),
    # Table 10.
    k4(
      'near_near',
      'positives near, negatives near',
      83.91,
      {'loss.positive_weights': 'near'},
      further=True,
      shows=('Table 10',),
    ),
    k4(
      'far_far',
      'positives far, negatives far',
      79.46,
      {'loss.negative_weights': 'far'},
      further=True,
      shows=('Table 10',),
    ),
    k4(
      'near_far',
      'positives near, negatives far',
      74.91,
      {'loss.positive_weights': 'near', 'loss.negative_weights': 'far'},
      further=True,
      shows=('Table 10',),
    ),
    # Table 20, whose Euclidean rows are those of Table 13 at t_neg = 2, except STL-10 with one positive (83.55 there).
    *(
      on(data, k1('cacr_k1_rbf', 'CACR, K = 1, RBF cost', None, RBF), accuracy, ('Table 20',))
      for data, accuracy in zip(SETS, (83.08, 55.90, 84.20), strict=True)
    ),
    *(
      on(
        data,
        k4('cacr_k4_rbf', 'CACR, K = 4, RBF cost, t_neg = 2', None, RBF),
        accuracy,
        ('Table 20',),
      )
      for data, accuracy in zip(SETS, (86.20, 58.81, 85.80), strict=True)
    ),
    # Negatives from the other view only. `au_cl` has those of both views, Wang & Isola's code those of the same view.
    k1(
      'au_cl_by_view_pair',
      'AU-CL, t = 2, negatives of the other view',
      (83.39, 83.49),
      AU_CL | {'method.by_view_pair': True},
      further=True,
    ),
    # Table 3: twice the epochs for one positive.
    *(
      on(data, changed(MAIN[name], '400', '400 epochs', LONG, minutes=11), accuracy, ('Table 3',))
      for data, found in TABLE_3.items()
      for name, accuracy in found.items()
    ),
    *(row for rule, published in IMBALANCED.items() for pair in published.items() for row in imbalanced(rule, *pair)),
    *(elsewhere(data, name) for data in TABLE_8 for name in METHODS),
    Row(
      'cmc_all_negatives',
      'CMC, negatives of all views',
      CMC,
      {'method.name': 'simclr', 'loss.name': 'multi_positive'},
      published={LINEAR: 85.54},
      minutes=9,
      further=True,
    ),
    Row(
      'cmc_0.07',
      'CMC, K = 4, τ = 0.07',
      CMC,
      {'temperature.tau': 0.07},
      published={LINEAR: 85.54},
      minutes=9,
      further=True,
    ),
    k1('hn_cl_no_debiasing', 'HN-CL, τ⁺ = 0', 83.67, HN_CL | {'loss.tau_plus': 0.0}, further=True),
    *(
      row
      for data in SETS
      for name, found in TABLE_13.items()
      for row in ablation(data, name, 't_neg', 'Table 13', found[data], CHOSEN[name][data])
    ),
    *(row for data, found in TABLE_12.items() for row in ablation(data, 'cacr_k4', 't_pos', 'Table 12', found, 1.0)),
    *(resnet50(data, *pair) for data, found in TABLE_9.items() for pair in found.items()),
    *(row for data in SETS for name in METHODS for row in batches(data, name)),
    *(positives(data, number) for data in SETS[:2] for number in (2, 6, 8, 10)),
    *(early(name, epochs) for name in ('cl', 'cacr_k1') for epochs in (1, 20)),
    *curves(),
    k4('cacr_k4_margin', 'CACR, K = 4, margin 1', None, MARGIN, further=True),
    k4('uaur_margin', 'UAUR, margin 1: mean costs', None, {**MARGIN, **UNIFORM}, further=True),
    k4(
      'triplet',
      'triplet loss, margin 1: hardest costs',
      None,
      {'method.by_view_pair': False, 'loss.name': 'triplet', 'loss.margin': 1.0},
      further=True,
    ),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
