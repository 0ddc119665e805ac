"""Every config key, with its meaning. The other configs inherit from this one and change a few keys.

Any key is also a flag (`--config.optimizer.learning_rate=0.03`) and an option of the file
(`--config=configs/cifar10.py:dystress,seed=1`). A section marked "named" takes a `name` and the parameters of
what it names. A new name drops the parameters of the old one.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.config import overridden, override, split_options
from ssl_jax.registry import nearest


def get_config(arg: str = '') -> ConfigDict:
  config = ConfigDict()
  config.seed = 0  # random seed of the initial weights, the data order and the augmentation
  config.epochs = 200  # passes over the training examples
  config.steps = 0  # train for this many steps instead (0: use epochs)
  config.batch_size = 128  # examples per step, in total over all devices
  config.deterministic = True  # on a GPU: runs are bitwise reproducible, but 4 to 9 % slower
  config.dtype = 'bfloat16'  # network compute dtype: bfloat16 or float32; losses, statistics and weights are float32

  config.data = ConfigDict()
  config.data.source = 'tfds'  # tfds, arrays (.npz), folder, tar (shards), parquet, imagenet, text, embedded (shapes)
  config.data.name = 'cifar10'  # tfds name; for the other sources, a label
  config.data.path = ''  # tfds data_dir ('': TFDS_DATA_DIR or the tfds default), .npz file, folder, or text file
  config.data.train_split = 'train'  # tfds split, subfolder (auto: detect), or shards: train, train-{0000..0331}.tar
  config.data.test_split = 'test'  # split for evaluations
  config.data.held_out = 0.0  # fraction of each class for testing, by a hash of the name, if both splits are the same
  config.data.image_size = 32  # pixels per side of the encoder's input
  config.data.stored_size = 0  # pixels per side of the images in memory, from which views are cropped (0: image_size)
  config.data.classes = ''  # a named list of classes: imagenet100 ('': all classes)
  config.data.tokens = 32  # text: tokens per sentence or caption; longer ones are truncated
  config.data.vocabulary = ''  # text: BERT's vocab.txt, or a tokenizer.json ('': the most frequent words of the data)
  config.data.columns = ''  # parquet: image, text and label columns, such as 'img,caption,label' ('': by usual names)
  config.data.broken = 'error'  # on an unreadable image or text: error, or skip (skipped images are counted)
  config.data.on_device = 'auto'  # yes: keep all images on the device; no: read on the host; auto: yes up to 4 GiB
  config.data.cache = ''  # on_device: folder for decoded images of stored_size, mapped by later runs ('': decode)
  config.data.workers = 0  # host processes that decode and crop images (0: use threads)
  config.data.shuffle_window = 0  # tar, parquet: images shuffled together, from random shards (0: all; parquet: 4096)

  config.imbalance = dict(name='none')  # named: a rule of ssl_jax/data/imbalance.py that selects training images

  config.views = 2  # augmented views per example
  config.augment = dict(name='dystress_cifar')  # named: preset of ssl_jax/data/augment.py and changes; text: dropout
  config.augment_other = dict()  # changes to `augment` for every second view (asymmetric views)

  config.small_crops = ConfigDict()  # multi-crop: extra views with fewer pixels and a smaller area
  config.small_crops.number = 0  # small crops per image
  config.small_crops.size = 16  # pixels per side
  config.small_crops.scale = (0.05, 0.14)  # fraction of the image's area; augment.crop_scale is for the other views

  config.model = dict(name='resnet18_cifar')  # named: an encoder of ssl_jax/models
  config.projector = dict(name='simclr')  # named: a head of ssl_jax/models/heads.py
  # Any method takes microbatches=N: it encodes a batch in N parts to save memory, with batch norm over each part.
  config.method = dict(name='simclr')  # named: a method of ssl_jax/methods
  config.loss = dict(name='info_nce')  # named: a loss of ssl_jax/losses
  config.temperature = dict(name='constant', tau=0.2)  # named: ssl_jax/temperature.py; 'none' if the loss takes none
  config.init = ''  # .safetensors file to start from or evaluate (exported, torchvision, BERT); random: untrained
  config.fork = ''  # RUNDIR@STEP: start from this checkpoint of a run with the same seed, data, batch and network
  config.ema = 0.0  # above 0, such as 0.999: evaluate a moving average of the weights, with this decay
  config.online_probe = 0.0  # above 0, such as 0.001: also train a linear classifier online, with this learning rate

  config.optimizer = ConfigDict()
  config.optimizer.name = 'sgd'  # sgd, lars, adamw, muon
  config.optimizer.learning_rate = 0.06  # peak learning rate, before `scaling`
  config.optimizer.scaling = 'none'  # none; linear: learning_rate·batch/256; sqrt: learning_rate·sqrt(batch)
  config.optimizer.momentum = 0.9  # sgd, lars and muon
  config.optimizer.betas = (0.9, 0.999)  # adamw; muon: for all parameters except kernels
  config.optimizer.weight_decay = 5e-4  # sgd and lars: L2 added to the gradient; adamw and muon: decoupled
  config.optimizer.exempt = False  # exempt biases and norms from weight decay and from the trust ratio of lars
  config.optimizer.schedule = 'cosine'  # cosine or linear (to zero), step (times decay at each milestone), constant
  config.optimizer.warmup_epochs = 0.0  # epochs of linear warm-up from zero
  config.optimizer.milestones = (160, 190)  # epochs, for schedule=step
  config.optimizer.decay = 0.1  # learning-rate factor at each milestone, for schedule=step
  config.optimizer.clip = 0.0  # maximum global gradient norm (0: no clipping)
  config.optimizer.fixed_predictor = False  # keep the learning rate of the predictor constant (SimSiam)

  config.parallel = ConfigDict()
  config.parallel.map = 'pmap'  # pmap or shard_map; both give the same results
  config.parallel.devices = 0  # devices to use on this machine (0: all)
  config.parallel.cpu_devices = 1  # split a CPU into this many devices, because convolutions often leave cores idle
  config.parallel.steps_per_call = 0  # steps scanned in one dispatch (0: an epoch, at most 512, or 1 on a CPU)
  config.parallel.processes = 1  # above 1: jax.distributed; start the same command once per host

  config.checkpoint = ConfigDict()
  config.checkpoint.every_minutes = 10.0  # minutes between checkpoints; also saved at the end and when interrupted
  config.checkpoint.every_steps = 0  # steps between checkpoints, rounded up to whole dispatches (0: every_minutes only)
  config.checkpoint.keep = 2  # number of newest checkpoints to keep
  config.checkpoint.keep_every = 0  # also keep the first checkpoint after every N steps, to fork from (0: none)

  config.log = ConfigDict()
  config.log.every_steps = 50  # steps per row of metrics.jsonl, TensorBoard and the progress output
  config.log.tensorboard = True  # also write TensorBoard files
  config.log.wandb = ''  # also log to this Weights & Biases project ('': no); needs the extra [wandb]

  config.eval = ConfigDict()
  config.eval.every_epochs = 20  # epochs between evaluations during training, such as kNN (0: only at the end)
  config.eval.measures = False  # during training, also compute all representation metrics (uniformity, tolerance, ...)
  config.eval.at_start = False  # before training, evaluate kNN of the untrained encoder and of raw pixels
  config.eval.at_end = False  # after training, run all of --mode=evaluate in the same process
  config.eval.features = 'backbone'  # features to evaluate: backbone or projector
  config.eval.train_images = 'kept'  # training images for kNN and classifiers: those that `imbalance` keeps, or all
  config.eval.crop = 1.0  # center crop of evaluations, as a fraction of the shorter side; 0.875: 224 of 256
  config.eval.flip = False  # average the normalized features of an image and of its mirror image
  config.eval.patches = 0  # above 0: average features over a grid of N × N crops, resized to the training views
  config.eval.patch = 0.75  # side of such a crop, as a fraction of the image's side
  config.eval.k = (200,)  # numbers of neighbors for kNN; () for no kNN
  config.eval.cap_k = False  # limit k to the number of images in the smallest training class
  config.eval.vote = 'cosine'  # kNN weights: exp(s / temperature) (cosine), 1 / L2 (distance), or equal (majority)
  config.eval.temperature = 0.1  # temperature of the cosine vote
  config.eval.whiten = False  # also evaluate kNN on features whitened by the training images: knn200_white
  config.eval.batch_size = 1000  # images per forward pass of an evaluation
  config.eval.linear = 'logistic'  # --mode=evaluate: logistic, ridge, or a protocol of evals/linear.py; '' for none
  config.eval.linear_during = False  # during training, also evaluate the classifier `eval.linear`
  config.eval.finetune = ''  # --mode=evaluate: fine-tune on all, 10%, 1% or 5-shot labels; linear [10%]: freeze encoder
  config.eval.finetune_learning_rate = 0.1  # for fine-tuning the whole encoder, at batch size 128
  config.eval.class_weights = ()  # for fine-tuning, in the order of the classes; (): all are 1
  config.eval.seeds = (0,)  # for linear classifiers and fine-tuning; mean and standard deviation are reported
  config.eval.views = 4  # augmented views per test image, for alignment, LiDAR and others
  config.eval.view_images = 2000  # maximum number of test images for which views are made
  config.eval.data = ConfigDict()  # data for evaluations; an empty value means the same as in `data`
  config.eval.data.name = ''  # another dataset, with all of its classes (transfer)
  config.eval.data.source = ''  # source of that dataset; needs eval.data.name
  config.eval.data.path = ''  # path of that dataset; needs eval.data.name
  config.eval.data.train_split = ''  # a labeled split, if `data` trains on an unlabeled one
  config.eval.data.test_split = ''  # test split of that dataset, or of `data`
  config.eval.sts = ''  # text only: folder of NAME.tsv files with scored sentence pairs
  config.eval.transfer = ''  # text only, --mode=evaluate: folder of NAME.tsv files with labeled sentences (SentEval)
  config.eval.prompts = ''  # image-text, zero-shot: plain, imagenet, shapes or a file ('': by dataset; none: skip)
  config.eval.class_names = ''  # image-text, zero-shot: file with one class name per line ('': names from the data)
  config.eval.retrieval = 5000  # image-text: maximum number of test pairs for retrieval (0: no retrieval)
  config.eval.file = ''  # --mode=evaluate: .npz file of features to evaluate instead of a checkpoint
  return options(config, arg)


def options(config: ConfigDict, arg: str, variants: Mapping[str, Mapping[str, Any]] | None = None) -> ConfigDict:
  """Applies `arg` to the config: comma-separated names of `variants` (dicts of keys), then `key=value` pairs.

  The name of the config's own method, such as `simclr`, is accepted as well and changes nothing.
  """
  variants, given = {config.method.name: {}} | dict(variants or {}), split_options(arg)
  for name in (option for option in given if '=' not in option):
    if name not in variants:
      hint = nearest(name, sorted(variants))
      raise ValueError(f'option {name!r} is neither key=value nor a known option of this config: {hint}')
    for key, value in variants[name].items():
      override(config, key, value)
  return overridden(config, [option for option in given if '=' in option])
