r"""Fine-tuning of an encoder pretrained on ImageNet (DySTreSS, Table 11 and A.2).

  python main.py --mode=export --workdir=RUN
  python main.py --mode=evaluate --config=configs/finetune.py:mhist --config.data.path=/data/mhist \
    --config.init=RUN/export/model.safetensors --workdir=runs/mhist

The first command writes the ResNet-50 of a run of configs/imagenet.py as RUN/export/model.safetensors; torchvision's
weights work, too. The second fine-tunes it with a linear classifier for 50 epochs at batch 128, and tests it. A dataset
is a folder with train and val or test, each with one folder per class, or a tfds dataset (CIFAR-10, CIFAR-100,
Flowers).
"""

from ml_collections import ConfigDict

from configs import base


def folder(name, **more):
  return {'data': dict(source='folder', name=name, path=name, train_split='auto', test_split='auto'), **more}


def binary(name, weight):
  """A dataset with two classes; the second one by name is the positive class."""
  return folder(name, **{'eval.class_weights': (1.0, weight), 'eval.finetune_learning_rate': 1.0})


# A.2 reports the class weights and learning rates. Class weights are in the order of the names of the class folders.
VARIANTS = {
  # Class folders: negative and positive.
  'mura': binary('mura', 0.7097),
  # Class folders: benign and malignant.
  'isic2016': binary('isic2016', 4.24),
  # Class folders: HP and SSA.
  'mhist': binary('mhist', 2.45),
  # Class folders: adenocarcinoma, adenoma, normal and serrated. The paper lists the weights in another order: normal,
  # serrated, adenocarcinoma and adenoma.
  'chaoyang': folder('chaoyang', **{'eval.class_weights': (1.0, 2.114, 1.264, 1.667)}),
  # No class weights.
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
