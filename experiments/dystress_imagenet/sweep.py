"""DySTreSS (Manna et al. 2024) on ImageNet-100 and ImageNet-1K: Tables 1, 2, 5, 8, 13, 14 and 15, and Figure 5.

python -m experiments.dystress_imagenet.sweep --of='Table 14'
"""

import pathlib
from collections.abc import Mapping, Sequence

from experiments import runner
from experiments.tables import Column, Row, Sweep

CONFIG, WHOLE = 'configs/imagenet100.py', 'configs/imagenet.py'
LINEAR, TOP5, KNN, KNN5 = 'finetune', 'finetune_top5', 'knn20', 'knn20_top5'  # linear: with crops and flips
UNIFORMITY, BETWEEN, TOLERANCE = (
  f'backbone/{name}' for name in ('uniformity', 'inter_class_uniformity', 'same_label_similarity')
)
IMAGES, WHOLE_IMAGES, LONG_TAIL = 126_689, 1_281_167, 12_210
TITLES = {
  'simclr': 'SimCLR, τ = 0.1',
  'dcl': 'DCL, τ = 0.1',
  'dclw': 'DCLW, τ = 0.1',
  'byol': 'BYOL',
  'barlow_twins': 'Barlow Twins',
  'vicreg': 'VICReg',
  'macl': 'MACL, τ₀ = 0.1',
  'dystress': 'DySTreSS, 0.1 to 0.2',
  'shifted': 'DySTreSS*, Δs = −0.4, k = 0.7, 0.1 to 0.2',
}


def linear(top1: float, top5: float | None = None) -> dict[str, float]:
  return {LINEAR: top1} if top5 is None else {LINEAR: top1, TOP5: top5}


# ImageNet-100. The rows with 0.1 to 0.2 and with Δs = −0.4 are also those of Tables 14 and 15.
TABLE_1 = {
  'simclr': linear(75.54, 93.06),
  'dystress': {LINEAR: (78.76, 78.78), TOP5: 94.70, KNN: 72.00, KNN5: 89.76, BETWEEN: -0.7710},
  'shifted': {LINEAR: 78.82, TOP5: 94.76, KNN: 71.58, KNN5: 90.16},
  'dcl': linear(77.38, 94.01),
  'macl': linear(78.28, 94.25),
  'byol': linear(75.02, 93.42),
  'barlow_twins': linear(75.88, 93.96),
  'vicreg': linear(76.36, 94.14),
}
ALSO = {'dystress': ('Table 14', 'Figure 5'), 'shifted': ('Table 15',)}
# (tau_min, tau_max): kNN-20 top-1 and top-5, linear top-1 and top-5, inter-class uniformity (sec. 5.8).
TABLE_14 = {
  (0.07, 0.1): (67.18, 87.82, 77.28, 94.16, -0.6584),
  (0.07, 0.5): (67.88, 88.22, 76.34, 93.72, -0.7202),
  (0.07, 0.2): (71.46, 89.42, 78.46, 94.40, -0.7422),
}
# (shift, scale): kNN-20 top-1 and top-5, linear top-1 and top-5.
TABLE_15 = {
  (0.0, 0.5): (71.66, 90.16, 78.46, 94.86),
  (0.2, 0.6): (71.58, 89.14, 78.56, 94.38),
  (0.4, 0.7): (71.58, 89.58, 78.46, 94.54),
  (-0.2, 0.6): (72.38, 89.99, 78.78, 94.59),
}
# ImageNet-1K: linear top-1 and top-5; uniformity and inter-class uniformity of Table 13.
TABLE_2 = {
  'simclr': (63.2, 85.2, -2.9084, -0.8739),
  'dystress': (65.21, 86.55, -3.0596, -1.0015),
  'dcl': (65.1, 86.2, -3.0786, -1.0053),
  'dclw': (64.2, 86.0, -3.0137, -0.9544),
  'macl': (64.3,),
  'byol': (62.4, 82.7),
  'barlow_twins': (62.9, 84.3),
  'vicreg': (63.0, 85.4),
}
# ImageNet-100, 400 epochs, batch 128: the width of the embeddings, linear top-1 and top-5.
TABLE_8 = {
  'dystress': ('DySTreSS, 0.1 to 0.2', 2048, 81.24, 95.64),
  'barlow_twins': ('Barlow Twins', 2048, 78.62, 94.72),
  'vicreg': ('VICReg', 2048, 79.22, 95.06),
  'zero_icl': ('Zero-ICL', 256, 78.02, 95.61),
  'zero_fcl': ('Zero-FCL', 2048, 79.32, 94.94),
  'zero_cl': ('Zero-CL', 2048, 79.26, 94.98),
  'w_mse': ('W-MSE', 256, 69.06, 91.22),
  'arb': ('ARB', 2048, 79.48, 95.51),
  'dino': ('DINO', 256, 74.84, 92.92),
  'byol': ('BYOL', 4096, 80.09, 94.99),
}


def row(name: str, title: str, config: str, published: Mapping, shows: tuple[str, ...], **more) -> Row:
  return Row(name, title, config, published=published, shows=shows, **{'minutes': 300, 'further': True, **more})


def table_1(name: str) -> Row:
  shows = ('Table 1', *ALSO.get(name, ()))
  return row(name, TITLES[name], f'{CONFIG}:{name}', TABLE_1[name], shows, further=False)


def ranged(low: float, high: float, numbers: Sequence[float]) -> Row:
  changes = {'temperature.tau_min': low, 'temperature.tau_max': high}
  published = dict(zip((KNN, KNN5, LINEAR, TOP5, BETWEEN), numbers, strict=True))
  names = (f'dystress_{low}_{high}', f'DySTreSS, {low} to {high}', f'{CONFIG}:dystress')
  return row(*names, published, ('Table 14', 'Figure 5'), changes=changes)


def shifted(shift: float, scale: float, numbers: Sequence[float]) -> Row:
  changes = {'temperature.shift': shift, 'temperature.scale': scale}
  published = dict(zip((KNN, KNN5, LINEAR, TOP5), numbers, strict=True))
  title = f'DySTreSS, Δs = {shift:g}, k = {scale}, 0.1 to 0.2'.replace('-', '−')
  return row(f'shifted_{shift}', title, f'{CONFIG}:shifted', published, ('Table 15',), changes=changes)


def whole(name: str, numbers: Sequence[float]) -> Row:
  """A row on ImageNet-1K."""
  published = dict(zip((LINEAR, TOP5, UNIFORMITY, BETWEEN), numbers, strict=False))
  shows = ('Table 2', 'Table 13') if UNIFORMITY in published else ('Table 2',)
  names = (f'imagenet_{name}', f'{TITLES[name]}, ImageNet-1K', f'{WHOLE}:{name}')
  return row(*names, published, shows, images=WHOLE_IMAGES, minutes=1500)


def longer(name: str, title: str, width: int, top1: float, top5: float) -> Row:
  """A row of Table 8. Projectors with another width in other tables get that of Table 8."""
  features = {'dystress': (2048, 2048), 'barlow_twins': (2048,) * 3, 'vicreg': (2048,) * 3}
  changes = {'projector.features': features[name]} if name in features else {}
  title = f'{title}, {width} features, 400 epochs, batch 128'
  more = dict(changes=changes, minutes=700)
  if name == 'w_mse':
    more['note'] = 'ours has 64 features'
  return row(f'epochs400_{name}', title, f'{CONFIG}:{name},epochs400', linear(top1, top5), ('Table 8',), **more)


def long_tail(name: str, title: str, accuracy: float) -> Row:
  changes = {'epochs': 2000, **({'temperature.period': 400} if name == 'kukleva' else {})}
  more = dict(changes=changes, images=LONG_TAIL, minutes=300, note='the paper does not name the metric')
  names = (f'long_tail_{name}', f'{title}, ImageNet-100-LT, 2,000 epochs', f'{CONFIG}:long_tail,{name}')
  return row(*names, linear(accuracy), ('Table 5',), **more)


SWEEP = Sweep(
  title='Dynamically Scaled Temperature in Self-Supervised Contrastive Learning (DySTreSS), ImageNet',
  protocol=(
    'ImageNet-100 unless a row says ImageNet-1K. ResNet-50, 224 pixels, 200 epochs (ImageNet-1K: 100), batch 256, last '
    'epoch. Linear classifier on the backbone features (2,048) as they are: SGD, learning rate 0.1 with a cosine '
    'schedule, 90 epochs, batch 256, with random crops (0.08 to 1 of the area) and flips. kNN: the same features, 20 '
    'neighbors, votes weighted by exp(s/0.1). Uniformity and inter-class uniformity: the same features of the '
    'validation images.'
  ),
  columns=(
    Column(LINEAR, 'linear top-1, %'),
    Column(TOP5, 'linear top-5, %'),
    Column(KNN, 'kNN-20 top-1, %'),
    Column(KNN5, 'kNN-20 top-5, %'),
    Column(UNIFORMITY, 'uniformity'),
    Column(BETWEEN, 'inter-class uniformity'),
    Column(TOLERANCE, 'tolerance', digits=3),
  ),
  common={'eval.finetune': 'linear'},
  rows=(
    *map(table_1, TABLE_1),
    *(ranged(*pair, numbers) for pair, numbers in TABLE_14.items()),
    *(shifted(*pair, numbers) for pair, numbers in TABLE_15.items()),
    # Sec. 5.1: 0.14 points above "the Top-1 accuracy reported in Table 1", which may be DCL's or DySTreSS's.
    row('dcl_dystress', 'DCL with DySTreSS, 0.1 to 0.2', f'{CONFIG}:dcl,dystress', {}, ('Table 1',)),
    long_tail('kukleva', "Kukleva's schedule", 45.3),
    long_tail('dystress', 'DySTreSS', 46.1),
    *(longer(name, *numbers) for name, numbers in TABLE_8.items()),
    *(whole(name, numbers) for name, numbers in TABLE_2.items()),
  ),
  images=IMAGES,
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
