"""CACR (Zheng et al. 2023) on ImageNet: Tables 4, 5, 15, 16 and 18, Figure 9, and the encoders for Tables 6 and 7.

python -m experiments.cacr_imagenet.sweep --list
"""

import dataclasses
import pathlib

from experiments import runner
from experiments.tables import Column, Row, Sweep

FILE, HUNDRED = 'configs/imagenet.py', 'configs/imagenet100.py'
LINEAR = 'finetune'
Changes = dict[str, object]
# Baselines at the batch sizes of Table 4, with the learning rates of their papers and the initialization of their code.
ZERO_INIT = {'model.zero_init_residual': True}
SIMCLR = {**ZERO_INIT, 'batch_size': 4096, 'optimizer.scaling': 'linear', 'optimizer.learning_rate': 0.3}
BYOL = {
  **ZERO_INIT,
  'batch_size': 4096,
  'optimizer.learning_rate': 0.2,
  'optimizer.weight_decay': 1.5e-6,
  'method.momentum': 0.996,
}
SWAV = {'batch_size': 4096, 'method.queue': 0, 'optimizer.learning_rate': 0.3}
SWAV_800 = SWAV | {'epochs': 800}
BARLOW = {**ZERO_INIT, 'batch_size': 1024}
SWAV_VIT = {'method.name': 'swav', 'projector.name': 'swav', 'loss.name': 'swav', 'temperature.tau': 0.1}
SIMCLR_VIT = {'method.name': 'simclr', 'temperature.tau': 0.1}


def row(name: str, title: str, option: str, accuracy: float | None, shows: str, changes: Changes | None = None) -> Row:
  published = {} if accuracy is None else {LINEAR: accuracy}
  tables = tuple(f'{kind} {number}' for kind, number in (pair.split() for pair in shows.split(', ')))
  # A cautious estimate for 200 epochs of two views, at 2,500 views/s. SimCLR reaches 7,000 (benchmarks/README.md).
  return Row(
    name, title, f'{FILE}:{option}', changes or {}, published=published, minutes=3500, further=True, shows=tables
  )


# Table 16: (option, title, changes, {epochs: accuracy}). Table 4 has the longest training of each method.
TABLE_16: dict[str, tuple[str, str, Changes, dict[int, float]]] = {
  'byol': ('byol', 'BYOL', BYOL, {100: 66.5, 200: 70.6, 400: 73.2, 800: 74.3}),
  'barlow_twins': ('barlow_twins', 'Barlow Twins', BARLOW, {1000: 73.2}),
  'swav': ('swav', 'SwAV', SWAV, {100: 66.5, 200: 69.1, 400: 70.7, 800: 71.8}),
  'simsiam': ('simsiam', 'SimSiam', {'eval.linear': 'imagenet_lars'}, {100: 68.1, 200: 70.0, 400: 70.8, 800: 71.3}),
  'simclr': ('simclr', 'SimCLR', SIMCLR, {100: 66.5, 200: 68.3, 400: 69.8, 800: 70.4, 1000: 71.7}),
  'moco': ('moco', 'MoCo v2', {}, {100: 67.4, 200: 69.9, 400: 71.0, 800: 72.2}),
  'fnc': ('fnc', 'FNC', {}, {100: 70.4, 1000: 74.4}),
  'cacr_k4': ('cacr_moco', 'CACR, K = 4', {}, {100: 68.3, 200: 70.4, 400: 73.8, 800: 74.0, 1000: 74.4}),
}
# Tables 5 and 15 have different numbers for some runs of Table 16: MoCo v2 67.5, CACR 70.35 and 70.4.
DETECTION = 'Table 7'  # uses the encoders of these runs; the paper does not state their epochs
ALSO = {
  'moco_200': ('Table 5', DETECTION, 'Table 15'),
  'cacr_k4_200': ('Table 5', DETECTION, 'Table 15', 'Figure 9'),
  'barlow_twins_1000': (DETECTION,),
  **{f'{name}_200': (DETECTION,) for name in ('byol', 'swav', 'simsiam', 'simclr')},
}
NOTES = {
  'moco_200': 'Tables 5 and 15: 67.5',
  'cacr_k4_200': 'Table 15: 70.35',
  'fnc_1000': 'ten views; Table 4 calls it multi-crop',
}


def table_16() -> list[Row]:
  found = []
  for name, (option, title, changes, published) in TABLE_16.items():
    for epochs, accuracy in published.items():
      run = f'{name}_{epochs}'
      made = row(run, f'{title}, {epochs:,} epochs', option, accuracy, 'Table 16', {**changes, 'epochs': epochs})
      shows = (*made.shows, *(('Table 4',) if epochs == max(published) else ()), *ALSO.get(run, ()))
      found.append(dataclasses.replace(made, shows=shows, note=NOTES.get(run, ''), minutes=17.5 * epochs))
  return found


def table_15(name: str, title: str, option: str, hundred: float, whole: float) -> tuple[Row, Row]:
  """A loss on MoCo v2, on ImageNet-100 and on ImageNet-1K."""
  made = row(name, f'{title}, MoCo v2', option, whole, 'Table 15')
  names = dict(name=f'imagenet100_{name}', title=f'{made.title}, ImageNet-100', config=f'{HUNDRED}:{option}')
  return dataclasses.replace(made, **names, published={LINEAR: hundred}, minutes=350, images=126_689), made


def table_18(
  name: str, title: str, option: str, tuned: float, linear: float, changes: Changes | None = None, also: str = ''
) -> list[Row]:
  """Both evaluations of an encoder of Table 18. `also`: another table that the linear one belongs to."""
  both = {**(changes or {}), 'eval.finetune': 'all'}
  shows = ', '.join(filter(None, ['Table 18', also]))
  return [
    row(f'{name}_finetuned', f'{title}, fine-tuned', option, tuned, 'Table 18', both),
    row(f'{name}_linear', f'{title}, linear', option, linear, shows, changes),
  ]


TABLE_5 = {
  'moco': ('MoCo v2', 'moco', 62.3, 59.9),
  'cacr_k1': ('CACR, K = 1', 'cacr_moco_k1', 64.5, 61.9),
  'cacr_k4': ('CACR, K = 4', 'cacr_moco', 66.1, 64.5),
}
OTHER_IMAGES = {'webvision': ('WebVision v1', 2_400_000), 'imagenet22k': ('ImageNet-22K', 14_200_000)}  # C.2

SWEEP = Sweep(
  title='Contrastive Attraction and Contrastive Repulsion for Representation Learning (CACR), ImageNet',
  protocol=(
    'ImageNet-1K unless a row says ImageNet-100. ResNet-50 on 224 pixels unless a row says ViT-B/16, last epoch. '
    'Linear classifier on the backbone features with random crops (0.08 to 1 of the area) and flips: SGD, learning '
    'rate 30, ×0.1 at epochs 60 and 80 of 100, batch 256; SimSiam: LARS, batch 4,096, 90 epochs. Fine-tuned: the '
    'whole network, SGD, learning rate 0.1, ×0.1 at epochs 30 and 40 of 50, batch 128 '
    '(ours; the papers of Table 18 have longer recipes).'
  ),
  columns=(
    Column(LINEAR, 'top-1, %'),
    Column('linear', 'linear without augmentation, %'),
    Column('knn20', 'kNN-20, %'),
  ),
  common={'eval.finetune': 'linear', 'eval.linear': 'cacr_large', 'eval.every_epochs': 0},
  images=1_281_167,
  rows=(
    *table_16(),
    row('swav_multi_crop_800', 'SwAV, multi-crop, 800 epochs', 'swav,multi_crop', 75.3, 'Table 4, Table 18', SWAV_800),
    dataclasses.replace(
      row('cacr_k1_1000', 'CACR, K = 1, 1,000 epochs', 'cacr_moco_k1', 73.7, 'Table 4', {'epochs': 1000}),
      note='the paper prints no epochs; 1,000 give the number for K = 4',
    ),
    *(
      dataclasses.replace(made, shows=(*made.shows, *more))
      for made, more in zip(
        table_15('align_uniform', 'AU-CL', 'align_uniform_moco', 77.66, 67.69), ((), (DETECTION,)), strict=True
      )
    ),
    *table_15('hard_negative', 'HN-CL', 'hard_negative_moco', 76.34, 67.41),
    *(
      dataclasses.replace(made, note=note, shows=(*made.shows, *more))
      for made, note, more in zip(
        table_15('cacr_k1', 'CACR, K = 1', 'cacr_moco_k1', 79.40, 68.40),
        ('', 'Table 5: 69.5'),
        ((), ('Table 5', DETECTION, 'Figure 9')),
        strict=True,
      )
    ),
    *table_15('cmc', 'CMC, K = 4, τ = 0.07', 'cmc_moco', 78.84, 69.45),
    table_15('moco', 'CL', 'moco', 77.54, 0.0)[0],
    table_15('cacr_k4', 'CACR, K = 4', 'cacr_moco', 80.46, 0.0)[0],
    *(
      dataclasses.replace(
        row(f'{data}_{name}', f'{title}, pretrained on {words}', f'{option},{data}', accuracy, 'Table 5'), images=images
      )
      for name, (title, option, *accuracies) in TABLE_5.items()
      for (data, (words, images)), accuracy in zip(OTHER_IMAGES.items(), accuracies, strict=True)
    ),
    *(
      row(f'cacr_k{k}_200', f'CACR, K = {k}, 200 epochs', 'cacr_moco', None, 'Figure 9', {'views': k + 1})
      for k in (2, 3)
    ),
    *table_18('moco_v3', 'MoCo v3', 'moco_v3', 77.0, 73.8),
    *table_18('cacr_v3', 'CACR on MoCo v3, K = 4', 'cacr_moco_v3', 78.1, 74.7),
    *table_18('simclr_v2', 'SimCLR v2', 'simclr_v2', 77.2, 71.7),
    *table_18('swav_multi_crop', 'SwAV, multi-crop', 'swav,multi_crop', 77.8, 75.3, SWAV_800)[:1],
    *table_18('cacr_v3_multi_crop', 'CACR on MoCo v3, multi-crop', 'cacr_moco_v3,multi_crop', 78.4, 75.3),
    *table_18('moco_v3_vit', 'MoCo v3, ViT-B/16', 'moco_v3_vit', 83.2, 76.5, also='Table 6'),
    *table_18('cacr_v3_vit', 'CACR on MoCo v3, K = 4, ViT-B/16', 'cacr_moco_v3_vit', 83.4, 76.8, also='Table 6'),
    *table_18('simclr_v2_vit', 'SimCLR, ViT-B/16', 'moco_v3_vit', 83.1, 73.9, SIMCLR_VIT),
    *table_18('swav_multi_crop_vit', 'SwAV, multi-crop, ViT-B/16', 'moco_v3_vit,multi_crop', 82.8, 71.6, SWAV_VIT),
    *table_18('cacr_v3_multi_crop_vit', 'CACR, multi-crop, ViT-B/16', 'cacr_moco_v3_vit,multi_crop', 83.4, 77.1),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
