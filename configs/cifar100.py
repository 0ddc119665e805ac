"""CIFAR-100; otherwise the same as configs/cifar10.py.

  python main.py --config=configs/cifar100.py --workdir=runs/cifar100

This takes about 6 minutes on one H200.
"""

from ml_collections import ConfigDict

from configs import base, cifar10

# CACR, App. C: sharper weights of the negatives, and the mean and standard deviation of CIFAR-100.
VARIANTS = {
  **cifar10.VARIANTS,
  'cacr': {**cifar10.VARIANTS['cacr'], 'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0)},
  'cacr_k1': {**cifar10.VARIANTS['cacr_k1'], 'loss': dict(name='cacr', t_pos=1.0, t_neg=3.0)},
}
for variant in ('cacr', 'cacr_k1', 'cmc'):
  VARIANTS[variant] = {**VARIANTS[variant], 'augment': dict(name='cacr_cifar100')}


def get_config(arg: str = '') -> ConfigDict:
  config = cifar10.get_config()
  config.data.name = 'cifar100'
  return base.options(config, arg, VARIANTS)
