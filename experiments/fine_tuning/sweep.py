"""DySTreSS (Manna et al. 2024), Table 11: encoders pretrained on ImageNet-1K, fine-tuned on seven datasets.

python -m experiments.fine_tuning.sweep --budget-minutes=60
"""

import pathlib

from experiments import runner
from experiments.tables import Column, Row, Sweep

ENCODERS = {'simclr': 'SimCLR', 'dcl': 'DCL', 'dystress': 'DySTreSS'}
SETS = {
  'mura': ('MURA', (81.81, 81.70, 82.27)),
  'chaoyang': ('Chaoyang', (83.22, 83.12, 83.26)),
  'isic2016': ('ISIC 2016', (85.49, 86.02, 85.75)),
  'mhist': ('MHIST', (83.62, 85.26, 83.98)),
  'cifar10': ('CIFAR-10', (96.93, 97.09, 97.14)),
  'cifar100': ('CIFAR-100', (82.99, 83.03, 83.96)),
  'flowers': ('Flowers', (93.82, 94.11, 96.76)),
}


def row(name: str, encoder: str, accuracy: float) -> Row:
  return Row(
    name=f'{name}_{encoder}',
    title=f'{SETS[name][0]}, {ENCODERS[encoder]}',
    config=f'configs/finetune.py:{name}',
    changes={'init': f'encoders/{encoder}.safetensors'},
    published={'finetune': accuracy},
    minutes=60,
    shows=('Table 11',),
    mode='evaluate',
  )


SWEEP = Sweep(
  title='Dynamically Scaled Temperature in Self-Supervised Contrastive Learning (DySTreSS), transfer to other images',
  protocol=(
    'ResNet-50, pretrained on ImageNet-1K for 100 epochs, then fine-tuned with a linear classifier: SGD, momentum 0.9, '
    '50 epochs, ×0.1 at epochs 30 and 40, batch 128, learning rate 0.1 (two classes: 1), cross-entropy with the class '
    'weights of A.2, random crops and flips, 224 pixels. Accuracy on the test images, last epoch.'
  ),
  columns=(Column('finetune', 'fine-tuned, %'),),
  rows=[row(name, *pair) for name, (_, found) in SETS.items() for pair in zip(ENCODERS, found, strict=True)],
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
