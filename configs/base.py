"""Every key of a run, with its meaning. Other configs inherit from here and change a few keys.

Any key is also a flag (`--config.optimizer.learning_rate=0.03`) and an option of the file
(`--config=configs/cifar10.py:dystress,seed=1`). A section marked "named" takes `name` and the parameters of what it
names; a new name drops the parameters of the old one.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.config import override, split_options
from ssl_jax.registry import nearest


def get_config(arg: str = '') -> ConfigDict:
  config = ConfigDict()
  config.seed = 0  # determines everything random: initial weights, data order, augmentation
  config.epochs = 200  # passes over the training examples
  config.steps = 0  # train for this many steps instead (0: use epochs)
  config.batch_size = 128  # examples per step, over all devices
  config.deterministic = True  # on a GPU: the same command gives the same bits, at 6 to 11 % less speed
  config.dtype = 'bfloat16'  # compute dtype of the network, or float32; losses, statistics and weights are float32

  config.data = ConfigDict()
  config.data.source = 'tfds'  # tfds, arrays (.npz), folder, tar (shards), parquet, imagenet, embedded (drawn), text
  config.data.name = 'cifar10'  # the tfds name; a label for the other sources
  config.data.path = ''  # tfds data_dir ('': TFDS_DATA_DIR or the tfds default), .npz file, folder, or text file
  config.data.train_split = 'train'  # tfds split, subfolder (auto: find it), or shards: train, train-{0000..0331}.tar
  config.data.test_split = 'test'  # of the images for evaluations
  config.data.held_out = 0.0  # share of each class to test on, by a hash of the name, if both splits are the same
  config.data.image_size = 32  # pixels per side of what the encoder sees
  config.data.stored_size = 0  # pixels per side of images in memory, from which views are cropped (0: image_size)
  config.data.classes = ''  # '' for all, or a named list of classes: imagenet100
  config.data.tokens = 32  # of sentences and captions: tokens of each; longer ones are cut
  config.data.vocabulary = ''  # of texts: a vocab.txt of BERT, or a tokenizer.json ('': their most frequent words)
  config.data.columns = ''  # parquet: columns of image, text and label, such as 'img,caption,label' ('': by name)
  config.data.broken = 'error'  # on an unreadable image or text: error, or skip (skipped images are counted)
  config.data.on_device = 'auto'  # yes: keep all images on the device; no: read on the host; auto: yes up to 4 GiB
  config.data.cache = ''  # on the device: a folder for decoded images of stored_size, which later runs map ('': decode)
  config.data.workers = 0  # processes that decode and crop on the host (0: threads)
  config.data.shuffle_window = 0  # tar, parquet: images shuffled together, from random shards (0: all; parquet: 4096)

  config.imbalance = dict(name='none')  # named: which training images to keep; a rule of ssl_jax/data/imbalance.py

  config.views = 2  # augmented views per example
  config.augment = dict(name='dystress_cifar')  # named: a preset of ssl_jax/data and changes to it; text: dropout
  config.augment_other = dict()  # changes to it for every second view (asymmetric views)

  config.small_crops = ConfigDict()  # multi-crop: extra views, small in pixels and in area
  config.small_crops.number = 0  # per image
  config.small_crops.size = 16  # pixels per side
  config.small_crops.scale = (0.05, 0.14)  # share of the image's area; augment.crop_scale is for the other views

  config.model = dict(name='resnet18_cifar')  # named: an encoder of ssl_jax/models
  config.projector = dict(name='simclr')  # named: a head of ssl_jax/models/heads.py
  # Any method takes microbatches=N: it encodes a batch in N parts, with batch norm over each part, in less memory.
  config.method = dict(name='simclr')  # named: a method of ssl_jax/methods
  config.loss = dict(name='info_nce')  # named: a loss of ssl_jax/losses
  config.temperature = dict(name='constant', tau=0.2)  # named: ssl_jax/temperature.py; 'none' for a loss without one
  config.init = ''  # a .safetensors file (exported, torchvision's, BERT's) to start from or to evaluate; or random
  config.fork = ''  # RUNDIR@STEP: start from this checkpoint of another run, with its seed, data, batch and network
  config.ema = 0.0  # above 0, such as 0.999: evaluate a moving average of the weights with this decay
  config.online_probe = 0.0  # above 0, such as 0.001: train a linear classifier alongside, with this learning rate

  config.optimizer = ConfigDict()
  config.optimizer.name = 'sgd'  # sgd, lars, adamw, muon
  config.optimizer.learning_rate = 0.06  # peak, before `scaling`
  config.optimizer.scaling = 'none'  # none; linear: learning_rate·batch/256; sqrt: learning_rate·sqrt(batch)
  config.optimizer.momentum = 0.9  # sgd, lars and muon
  config.optimizer.betas = (0.9, 0.999)  # adamw; with muon of what is not a kernel
  config.optimizer.weight_decay = 5e-4  # sgd and lars: L2 added to the gradient; adamw and muon: decoupled
  config.optimizer.exempt = False  # no weight decay and no trust ratio for biases and norms
  config.optimizer.schedule = 'cosine'  # cosine or linear (to zero), step (times decay at each milestone), constant
  config.optimizer.warmup_epochs = 0.0  # linear warm-up from zero
  config.optimizer.milestones = (160, 190)  # epochs, for schedule=step
  config.optimizer.decay = 0.1  # factor at each milestone
  config.optimizer.clip = 0.0  # largest global gradient norm (0: no clipping)
  config.optimizer.fixed_predictor = False  # the learning rate of the predictor does not decay (SimSiam)

  config.parallel = ConfigDict()
  config.parallel.map = 'pmap'  # pmap or shard_map: the same update and the same numbers
  config.parallel.devices = 0  # devices to use on this machine (0: all)
  config.parallel.cpu_devices = 1  # split a CPU into this many devices; convolutions often leave cores idle
  config.parallel.steps_per_call = 0  # steps scanned in one dispatch (0: an epoch on accelerators, 1 on a CPU)
  config.parallel.processes = 1  # above 1: jax.distributed; start the same command once per host

  config.checkpoint = ConfigDict()
  config.checkpoint.every_minutes = 10.0  # also saved at the end of training and when interrupted
  config.checkpoint.every_steps = 0  # rounded up to the end of a dispatch (0: use every_minutes only)
  config.checkpoint.keep = 2  # newest checkpoints to keep
  config.checkpoint.keep_every = 0  # also keep the first checkpoint after every N steps, to fork from

  config.log = ConfigDict()
  config.log.every_steps = 50  # steps per row of metrics.jsonl, TensorBoard and the progress output
  config.log.tensorboard = True  # also write TensorBoard files
  config.log.wandb = ''  # also write to this project of Weights & Biases ('': no); needs the extra [wandb]

  config.eval = ConfigDict()
  config.eval.every_epochs = 20  # kNN during training (0: only at the end)
  config.eval.measures = False  # during training also all representation metrics (uniformity, tolerance, ...)
  config.eval.at_start = False  # kNN of the untrained encoder and of raw pixels before training
  config.eval.at_end = False  # run all of --mode=evaluate after training, in the same process
  config.eval.features = 'backbone'  # backbone or projector
  config.eval.train_images = 'kept'  # for neighbors and classifiers: those kept by `imbalance`, or all
  config.eval.crop = 1.0  # center crop of evaluations, as a share of the shorter side; 0.875: 224 of 256
  config.eval.flip = False  # features: the mean of those of an image and of its mirror image, each a unit vector
  config.eval.patches = 0  # above 0: the mean over a grid of so many crops per side, resized to the training views
  config.eval.patch = 0.75  # side of such a crop, as a share of the image's
  config.eval.k = (200,)  # numbers of neighbors; () for no kNN
  config.eval.cap_k = False  # no more neighbors than the smallest training class has images
  config.eval.vote = 'cosine'  # cosine: exp(s / temperature); distance: 1 / L2; majority
  config.eval.temperature = 0.1  # of the cosine vote
  config.eval.whiten = False  # kNN also on features whitened by the training images: knn200_white
  config.eval.batch_size = 1000  # images per forward pass of an evaluation
  config.eval.linear = 'logistic'  # --mode=evaluate: logistic, ridge, or a protocol of evals/linear.py; '' for none
  config.eval.linear_during = False  # during training also the classifier `eval.linear`
  config.eval.finetune = ''  # --mode=evaluate: fine-tune on all, 10%, 1% or 5-shot labels; linear [10%]: frozen
  config.eval.finetune_learning_rate = 0.1  # of fine-tuning the whole encoder, per 128 images
  config.eval.class_weights = ()  # of fine-tuning, in the order of the classes; (): inverse to the images of a class
  config.eval.seeds = (0,)  # of the linear classifier and of fine-tuning; reports mean and standard deviation
  config.eval.views = 4  # augmented views per test image, for alignment, LiDAR and others
  config.eval.view_images = 2000  # test images with views, at most
  config.eval.data = ConfigDict()  # images of evaluations; empty values are those of `data`
  config.eval.data.name = ''  # another dataset, with all of its classes (transfer)
  config.eval.data.source = ''  # of that dataset; needs eval.data.name
  config.eval.data.path = ''  # of that dataset; needs eval.data.name
  config.eval.data.train_split = ''  # a labeled split, if `data` trains on an unlabeled one
  config.eval.data.test_split = ''  # of either dataset
  config.eval.sts = ''  # text only: a folder of NAME.tsv with scored sentence pairs
  config.eval.transfer = ''  # text only, --mode=evaluate: a folder of NAME.tsv with labeled sentences (SentEval)
  config.eval.prompts = ''  # image and text, zero-shot: plain, imagenet, shapes, or a file; '': by data set; none
  config.eval.class_names = ''  # image and text, zero-shot: a file with a name per class ('': those of the data)
  config.eval.retrieval = 5000  # image and text: test pairs for retrieval, at most (0: none)
  config.eval.file = ''  # --mode=evaluate: an .npz with features to evaluate instead of a checkpoint
  return options(config, arg)


def options(config: ConfigDict, arg: str, variants: Mapping[str, Mapping[str, Any]] | None = None) -> ConfigDict:
  """The config changed by `arg`: comma-separated names of `variants` (dicts of keys) and `key=value` pairs."""
  for option in split_options(arg):
    key, equals, value = option.partition('=')
    if equals:
      override(config, key, value)
    elif key in (variants or {}):
      for name, changed in variants[key].items():
        override(config, name, changed)
    else:
      hint = nearest(option, sorted(variants or {}))
      raise ValueError(f'option {option!r} is neither key=value nor a variant of this config: {hint}')
  return config
