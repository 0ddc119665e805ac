"""Fine-tuning of an encoder that was pretrained on ImageNet: DySTreSS, Table 11 and A.2.

  python main.py --mode=export --workdir=RUN
  python main.py --mode=evaluate --config=configs/finetune.py:mhist --config.data.path=/data/mhist \
    --config.init=RUN/export/model.safetensors --workdir=runs/mhist

The first command writes the ResNet-50 of a run of configs/imagenet.py as RUN/export/model.safetensors; torchvision's
weights work too. The second trains it with a linear classifier, 50 epochs at batch 128, and tests it. A set is a folder
with train and val or test, each with one folder per class, or a tfds set (CIFAR-10, CIFAR-100, Flowers).
"""

from ml_collections import ConfigDict

from configs import base


def folder(name, **more):
  return {'data': dict(source='folder', name=name, path=name, train_split='auto', test_split='auto'), **more}


def binary(name, weight):
  """Two classes; the second by name is the positive one."""
  return folder(name, **{'eval.class_weights': (1.0, weight), 'eval.finetune_learning_rate': 1.0})


# A.2 prints the weights and the learning rates. Class weights are in the order of the names of the class folders.
VARIANTS = {
  # Folders negative and positive; benign and malignant; HP and SSA.
  'mura': binary('mura', 0.7097),
  'isic2016': binary('isic2016', 4.24),
  'mhist': binary('mhist', 2.45),
  # Folders adenocarcinoma, adenoma, normal and serrated; the paper prints the weights of normal, serrated,
  # adenocarcinoma and adenoma.
  'chaoyang': folder('chaoyang', **{'eval.class_weights': (1.0, 2.114, 1.264, 1.667)}),
  # No class weights: the classes have equally many training images, so the default weights are 1.
  'cifar10': {'data.name': 'cifar10'},
  'cifar100': {'data.name': 'cifar100'},
  'flowers': {'data.name': 'oxford_flowers102'},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.image_size = 224
  config.augment = dict(name='simclr_imagenet')  # fine-tuning uses its crops, flips, mean and standard deviation
  config.model = dict(name='resnet50')
  config.eval.finetune = 'all'
  config.eval.crop = 0.875
  config.eval.batch_size = 500
  config.eval.k = ()
  config.eval.linear = ''
  return base.options(config, arg, VARIANTS)
