"""Tiny-ImageNet, ResNet-50; otherwise the same as configs/cifar10.py (DySTreSS A.1).

  python main.py --mode=prepare --config=configs/tiny_imagenet.py --config.data.path=/data/tiny-imagenet-200
  python main.py --config=configs/tiny_imagenet.py --workdir=runs/tiny --config.data.path=/data/tiny-imagenet-200

`data.path` holds `train/<wnid>/` and `val/<wnid>/`. The first command creates them, because the archive has all
validation images in one folder. The 100,000 images of 64 pixels fit on the device.
"""

from ml_collections import ConfigDict

from configs import base, cifar10

MEAN_STD = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
VARIANTS = {
  name: {**variant, 'augment': dict(variant['augment'], **MEAN_STD)} if 'augment' in variant else variant
  for name, variant in cifar10.VARIANTS.items()
}


def get_config(arg: str = '') -> ConfigDict:
  config = cifar10.get_config()
  config.data.source, config.data.name, config.data.path = 'folder', 'tiny_imagenet', 'tiny-imagenet-200'
  config.data.test_split = 'val'
  config.data.image_size = 64
  config.model = dict(name='resnet50')
  config.augment = dict(name='dystress_cifar', **MEAN_STD)
  return base.options(config, arg, VARIANTS)
