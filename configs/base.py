"""Every key of a run, with its meaning. Other configs inherit from here and change a few.

Any key is also a flag (`--config.optimizer.learning_rate=0.03`) and an option of the file
(`--config=configs/cifar10.py:dystress,seed=1`). A section marked "named" takes, beside `name`, the parameters of
what it names; giving it another name drops the parameters of the old one.
"""

import re

from ml_collections import ConfigDict

from ssl_jax.config import override
from ssl_jax.registry import nearest


def get_config(arg=''):
  config = ConfigDict()
  config.seed = 0  # initial weights, data order, augmentation: everything random follows from it
  config.epochs = 200  # passes over the training images
  config.steps = 0  # train this many steps instead (0: the epochs decide)
  config.batch_size = 128  # images a step, over all devices
  config.deterministic = True  # on a GPU: the same command gives the same bits, at about 4 % less speed
  config.dtype = 'bfloat16'  # of the network's compute: bfloat16 or float32; losses, statistics and weights are float32

  config.data = ConfigDict()
  config.data.source = 'tfds'  # tfds, arrays (.npz), folder (of images), embedded (drawn on the spot), text
  config.data.name = 'cifar10'  # the tfds name; a label for the other sources
  config.data.path = ''  # tfds data_dir ('': TFDS_DATA_DIR or the tfds default), .npz file, image folder, or text file
  config.data.train_split = 'train'  # tfds split, or sub-folder
  config.data.test_split = 'test'
  config.data.image_size = 32  # pixels a side of what the encoder sees
  config.data.stored_size = 0  # pixels a side of the images on the device that views are cropped from (0: image_size)
  config.data.classes = ''  # '' for all, or a named list of classes: imagenet100
  config.data.tokens = 32  # of text: the length of a sentence, longer ones are cut
  config.data.vocabulary = ''  # of text: a vocab.txt of BERT ('': the most frequent words of the sentences)
  config.data.broken = 'error'  # an unreadable image: error, or skip (and count)
  config.data.on_device = 'auto'  # yes: all images live on the device; no: host workers; auto: yes up to 4 GiB
  config.data.workers = 0  # processes that decode and crop what does not live on the device (0: threads)

  config.imbalance = dict(name='none')  # named: which training images stay; a rule of ssl_jax/data/imbalance.py

  config.views = 2  # augmented views of each image
  config.augment = dict(name='dystress_cifar')  # named: a preset of ssl_jax/data/augment.py and changes; text: dropout
  config.augment_other = dict()  # what to change in it for every second view (asymmetric views)

  config.small_crops = ConfigDict()  # multi-crop: further views of an image, small in pixels and in what they show
  config.small_crops.number = 0  # of each image
  config.small_crops.size = 16  # pixels a side
  config.small_crops.scale = (0.05, 0.14)  # area of the crop, of the image's; augment.crop_scale is for the others

  config.model = dict(name='resnet18_cifar')  # named: an encoder of ssl_jax/models
  config.projector = dict(name='simclr')  # named: a head of ssl_jax/models/heads.py
  config.method = dict(name='simclr')  # named: a method of ssl_jax/methods
  config.loss = dict(name='info_nce')  # named: a loss of ssl_jax/losses
  config.temperature = dict(name='constant', tau=0.2)  # named: ssl_jax/temperature.py; none for a loss without one
  config.init = ''  # a .safetensors file (--mode=export's, torchvision's, BERT's) to start from or to judge; or random
  config.ema = 0.0  # above 0, such as 0.999: evaluations use the average of the weights with this decay
  config.probe = 0.0  # above 0, such as 0.001: a linear classifier learns beside the encoder, at this rate of Adam

  config.optimizer = ConfigDict()
  config.optimizer.name = 'sgd'  # sgd, lars, adamw
  config.optimizer.learning_rate = 0.06
  config.optimizer.scaling = 'none'  # none; linear: rate·batch/256; sqrt: rate·sqrt(batch)
  config.optimizer.momentum = 0.9  # of sgd and lars
  config.optimizer.betas = (0.9, 0.999)  # of adamw
  config.optimizer.weight_decay = 5e-4
  config.optimizer.exempt = False  # no decay and no trust ratio for biases and norms
  config.optimizer.schedule = 'cosine'  # cosine or linear (to zero), step (times decay at each milestone), constant
  config.optimizer.warmup_epochs = 0.0  # linear from zero
  config.optimizer.milestones = (160, 190)  # epochs, of schedule step
  config.optimizer.decay = 0.1
  config.optimizer.clip = 0.0  # the norm that a step's gradient is cut to where it is longer (0: as it is)

  config.parallel = ConfigDict()
  config.parallel.map = 'pmap'  # pmap or shard_map: the same update, the same numbers
  config.parallel.devices = 0  # how many of this machine's devices (0: all)
  config.parallel.cpu_devices = 1  # into how many devices a CPU is split; convolutions often leave cores idle
  config.parallel.steps_per_call = 0  # steps scanned in one dispatch (0: an epoch on accelerators, 1 on a CPU)
  config.parallel.processes = 1  # more than 1: jax.distributed, one process a host, each started with the same command

  config.checkpoint = ConfigDict()
  config.checkpoint.every_minutes = 10.0  # one is also written at the end and at an interruption
  config.checkpoint.every_steps = 0  # at the end of the dispatch that they fall into; 0: the minutes decide alone
  config.checkpoint.keep = 2

  config.log = ConfigDict()
  config.log.every_steps = 50  # a row of metrics.jsonl, of TensorBoard and of the plain progress
  config.log.tensorboard = True

  config.eval = ConfigDict()
  config.eval.every_epochs = 20  # kNN on the way (0: only at the end)
  config.eval.measures = False  # on the way also uniformity, entropy, bound gaps and all other measures, of both layers
  config.eval.at_start = False  # kNN of the untrained encoder and of raw pixels first
  config.eval.at_end = False  # all of --mode=evaluate after training, without reading the data again
  config.eval.features = 'backbone'  # backbone or projector
  config.eval.train_images = 'kept'  # that neighbours and classifiers come from: kept by `imbalance`, or all
  config.eval.crop = 1.0  # the share of the shorter side, in the centre, that evaluations see; 0.875: 224 of 256
  config.eval.k = (200,)  # neighbours; () for no kNN
  config.eval.vote = 'cosine'  # cosine: exp(s / temperature); distance: 1 / L2; majority
  config.eval.temperature = 0.1
  config.eval.batch_size = 1000
  config.eval.linear = 'logistic'  # of --mode=evaluate: logistic, ridge, a protocol of evals/linear.py; '' for none
  config.eval.finetune = ''  # of --mode=evaluate: labels to fine-tune on: all, 10%, 1%, 5-shot; linear [10%]: frozen
  config.eval.seeds = (0,)  # of the linear classifier and of fine-tuning: mean and spread
  config.eval.views = 4  # augmented views of test images, for alignment, LiDAR and the like
  config.eval.view_images = 2000  # of how many test images, at most
  config.eval.data = ConfigDict()  # images to judge with; what is empty is as in `data`
  config.eval.data.name = ''  # another set, with all of its classes (transfer)
  config.eval.data.source = ''  # of that set, which needs a name
  config.eval.data.path = ''  # of that set, which needs a name
  config.eval.data.train_split = ''  # a labelled split, where `data` trains on one without labels
  config.eval.data.test_split = ''  # of either set
  config.eval.sts = ''  # of text: a folder of NAME.tsv, pairs of sentences with scores; on the way and at the end
  config.eval.file = ''  # of --mode=evaluate: an .npz of anyone's features instead of a run's checkpoint
  return options(config, arg)


def options(config, arg, variants=None):
  """The config changed by `arg`: comma-separated names of `variants` (dicts of keys) and `key=value` pairs."""
  apart = re.split(r',(?![^(\[{]*[)\]}])', arg)  # a comma inside (a, b), [a, b] or {...} does not part options
  for option in filter(None, apart):
    key, equals, value = option.partition('=')
    if equals:
      override(config, key, value)
    elif key in (variants or {}):
      for name, changed in variants[key].items():
        override(config, name, changed)
    else:
      mend = nearest(option, sorted(variants or {}))
      raise ValueError(f'option {option!r} is neither key=value nor a variant of this config: {mend}')
  return config
