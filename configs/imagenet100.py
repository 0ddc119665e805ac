"""ImageNet-100, ResNet-50, 200 epochs: LARS at 0.075·sqrt(batch), warm-up, cosine, bf16, 224 pixels (DySTreSS, sec. 4).

  python main.py --config=configs/imagenet100.py --config.data.path=/data/imagenet

`data.path` holds ImageNet-1K as class folders or as a prepared tfds set (see configs/imagenet.py); the 100 classes are
selected from it. The options are those of configs/imagenet.py, and the memory bank. `:any_folder` is this recipe for
another folder of images, with all of its classes; see also configs/folder.py.
"""

from ml_collections import ConfigDict

from configs import base, imagenet

WANG_LIU = {
  'views': 1,
  'batch_size': 128,
  'augment': dict(name='moco_v2'),  # the blur of sec. 5.1 is not specified; these are the authors' views with blur
  'projector': dict(name='moco', features=(128,)),
  'temperature': dict(name='constant', tau=0.3),
  'optimizer': dict(imagenet.SGD, learning_rate=0.03, schedule='step', milestones=(160, 190)),
  'eval.linear': 'behaviour',
}

VARIANTS = {
  **imagenet.VARIANTS,
  'any_folder': {'data.source': 'folder', 'data.classes': '', 'data.name': 'folder'},
  # Keeps all images on the device, as center squares of 256 pixels. The first run decodes them into a cache.
  'on_device': {'data.on_device': 'yes', 'data.stored_size': 256, 'data.cache': '~/.cache/ssl_jax/images'},
  # CACR C.2: MoCo v2 has half the batch size.
  **{
    name: {**recipe, 'batch_size': 128}
    for name, recipe in imagenet.VARIANTS.items()
    if recipe.get('method', {}).get('name') == 'moco'
  },
  # Wang & Liu 2021, sec. 5: the negatives are the whole memory bank.
  'memory_bank': {**WANG_LIU, 'method': dict(name='memory_bank', negatives=0)},
  # Wang & Liu 2021, sec. 5: the negatives are the hardest 3.4 % of the memory bank.
  'memory_bank_hard': {**WANG_LIU, 'method': dict(name='memory_bank'), 'loss': dict(name='hard', fraction=0.034)},
  # ImageNet-100-LT has 12,210 images (Jiang et al. 2021).
  'long_tail': {'imbalance': dict(name='pareto', total=12_210, n_max=1280, n_min=5, alpha=6.0)},
  'uniform': {'imbalance': dict(name='uniform', total=12_210)},
}


def get_config(arg: str = '') -> ConfigDict:
  config = imagenet.get_config()
  config.epochs = 200
  config.data.name = config.data.classes = 'imagenet100'
  return base.options(config, arg, VARIANTS)
