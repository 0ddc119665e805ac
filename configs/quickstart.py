"""Shapes drawn on the spot, a small ResNet, a few minutes on two CPU cores.

  make train

The classes are shapes, and nothing else about an image says which one it is: raw pixels do not help.
"""

from configs import base


def get_config(arg=''):
  config = base.get_config()
  config.data.source, config.data.name = 'embedded', 'embedded'
  config.dtype = 'float32'
  config.batch_size = 256
  config.epochs = 10
  config.model = dict(name='resnet_tiny')
  config.eval.at_start = True
  config.eval.every_epochs = 5
  config.eval.k = (20,)
  return base.options(config, arg)
