"""CIFAR-100, otherwise as configs/cifar10.py.

  python main.py --config=configs/cifar100.py --workdir=runs/cifar100

One GPU (H200): about 5 minutes.
"""

from configs import base, cifar10


def get_config(arg=''):
  config = cifar10.get_config()
  config.data.name = 'cifar100'
  return base.options(config, arg, cifar10.VARIANTS)
