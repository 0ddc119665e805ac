"""ImageNet-100, ResNet-50, 200 epochs (dystress A.1): LARS at 0.075·sqrt(batch), warm-up, cosine, bf16, 224 pixels.

  python main.py --config=configs/imagenet100.py --workdir=runs/imagenet100 --config.data.path=/data/imagenet

`data.path` holds `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG` of ImageNet-1K; the 100 classes are chosen from it. Host
workers decode and crop, so give it many cores and as many workers (`--config.data.workers=16`). On another folder of
images take all of its classes: `--config=configs/imagenet100.py:any_folder`.
"""

from configs import base

VARIANTS = {
  'dystress': {'temperature': dict(name='cosine', tau_min=0.1, tau_max=0.2)},
  'any_folder': {'data.classes': '', 'data.name': 'folder'},
}


def get_config(arg=''):
  config = base.get_config()
  config.epochs = 200
  config.batch_size = 256
  config.data.source, config.data.name, config.data.path = 'folder', 'imagenet100', 'imagenet'
  config.data.test_split = 'val'
  config.data.image_size = 224
  config.data.classes = 'imagenet100'
  config.data.on_device = 'no'
  config.data.workers = 16
  config.augment = dict(name='moco_v2')
  config.model = dict(name='resnet50')
  config.optimizer.name = 'lars'
  config.optimizer.learning_rate, config.optimizer.scaling = 0.075, 'sqrt'
  config.optimizer.weight_decay = 1e-6
  config.optimizer.exempt = True
  config.optimizer.warmup_epochs = 10.0
  config.eval.crop = 0.875
  config.eval.k = (20,)
  config.eval.batch_size = 500
  return base.options(config, arg, VARIANTS)
