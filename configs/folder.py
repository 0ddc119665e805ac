"""SimCLR on your own images: a folder DIR with class folders, with or without train and val, or with images only.

  python main.py --config=configs/folder.py --config.data.path=DIR

The default is for a laptop: a small ResNet on 64 pixels, 100 epochs. `:gpu` is a ResNet-50 on 224 pixels for one GPU.
If DIR has no train and val (or test), a tenth of each class is held out for testing. Images without class folders have
no labels: `:unlabeled` trains without kNN. The dataset is named after its folder. See docs/your_images.md.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = {
  # The encoder and optimizer of configs/imagenet100.py: bfloat16, views cropped from 256 pixels.
  'gpu': {
    'data': dict(image_size=224, stored_size=256, workers=8),
    'dtype': 'bfloat16',
    'epochs': 200,
    'batch_size': 256,
    'model': dict(name='resnet50'),
    'projector': dict(name='simclr'),
    'augment': dict(name='simclr_imagenet'),
    'optimizer': dict(
      name='lars', learning_rate=0.075, scaling='sqrt', weight_decay=1e-6, exempt=True, warmup_epochs=10.0
    ),
    'eval.crop': 0.875,
    'eval.batch_size': 500,
  },
  # Without labels there is nothing to test, so all images are used for training.
  'unlabeled': {'data.held_out': 0.0, 'eval.k': (), 'eval.linear': ''},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.source, config.data.name = 'folder', ''  # '': named after data.path
  config.data.train_split = config.data.test_split = 'auto'
  config.data.held_out = 0.1
  config.data.image_size, config.data.stored_size = 64, 128  # crops of 0.2 to 1 of the area need little upsampling
  config.dtype = 'float32'
  config.epochs, config.batch_size = 100, 64
  config.augment = dict(name='moco_v2', blur=0.0)  # a blur of 2 pixels would hide much of a 64-pixel image
  config.model = dict(name='resnet_tiny')
  config.projector = dict(name='simclr', features=(128, 128))
  config.optimizer.learning_rate = 0.1
  config.optimizer.weight_decay = 1e-4
  config.optimizer.warmup_epochs = 2.0
  config.parallel.cpu_devices = 2
  config.log.every_steps = 10
  config.eval.at_start = True
  config.eval.every_epochs = 10
  config.eval.k, config.eval.cap_k = (20,), True
  return base.options(config, arg, VARIANTS)
