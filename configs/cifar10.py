"""CIFAR-10, ResNet-18, SimCLR at tau 0.2, 200 epochs.

  python main.py --config=configs/cifar10.py --workdir=runs/cifar10

One GPU (H200): about 5 minutes. kNN-200 at the last epoch: 84 or more.
Variants: `--config=configs/cifar10.py:dystress`, `:dystress,seed=1`, and so on; see VARIANTS.
"""

from configs import base

VARIANTS = {
  # A temperature that depends on the similarity (dystress, Alg. 1).
  'dystress': {'temperature': dict(name='cosine', tau_min=0.07, tau_max=0.2)},
  # The batch of supervised A.4 and of most peers; the rate grows with it.
  'batch512': {'batch_size': 512, 'optimizer.learning_rate': 0.24},
}


def get_config(arg=''):
  config = base.get_config()
  config.data.name = 'cifar10'
  config.model = dict(name='resnet18_cifar')
  config.augment = dict(name='dystress_cifar')
  return base.options(config, arg, VARIANTS)
