"""ImageNet-100, ResNet-50, 200 epochs: LARS at 0.075·sqrt(batch), warm-up, cosine, bf16, 224 pixels (dystress sec. 4).

  python main.py --config=configs/imagenet100.py --workdir=runs/imagenet100 --config.data.path=/data/imagenet

`data.path` holds `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG` of ImageNet-1K; the 100 classes are chosen from it. Host
workers decode and crop, so give it many cores and as many workers (`--config.data.workers=16`). The variants are those
of configs/imagenet.py, and the memory bank. On another folder of images take all of its classes:
`--config=configs/imagenet100.py:any_folder`.
"""

from configs import base, imagenet

BEHAVIOUR = {
  'views': 1,
  'batch_size': 128,
  'augment': dict(name='moco_v2'),
  'projector': dict(name='moco', features=(128,)),
  'temperature': dict(name='constant', tau=0.3),
  'optimizer': dict(imagenet.SGD, learning_rate=0.03, schedule='step', milestones=(160, 190)),
  'eval.linear': 'behaviour',
}

VARIANTS = {
  **imagenet.VARIANTS,
  'any_folder': {'data.classes': '', 'data.name': 'folder'},
  # cacr C.2: half the batch.
  **{name: {**imagenet.VARIANTS[name], 'batch_size': 128} for name in imagenet.VARIANTS if 'moco' in name},
  # Behaviour, sec. 5: the whole bank, or the hardest 3.4 % of it.
  'memory_bank': {**BEHAVIOUR, 'method': dict(name='memory_bank', negatives=0)},
  'memory_bank_hard': {**BEHAVIOUR, 'method': dict(name='memory_bank'), 'loss': dict(name='hard', fraction=0.034)},
  # ImageNet-100-LT has 12.21 thousand images (Jiang et al. 2021).
  'long_tail': {'imbalance': dict(name='pareto', total=12_210, n_max=1280, n_min=5, alpha=6.0)},
  'uniform': {'imbalance': dict(name='uniform', total=12_210)},
}


def get_config(arg=''):
  config = imagenet.get_config()
  config.epochs = 200
  config.data.name = config.data.classes = 'imagenet100'
  return base.options(config, arg, VARIANTS)
