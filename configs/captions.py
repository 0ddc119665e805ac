"""Synthetic shapes with captions: CLIP on a laptop, in a few minutes.

  python main.py --config=configs/captions.py:clip

Images and captions are generated. The metric `zero_shot` is the accuracy of naming the shape in a test image without
labels, by comparing the image with sentences such as "a star". An untrained model names one shape in eight correctly, a
trained one 95 % or more. Losses: `clip` (InfoNCE with a learned temperature), `siglip`, `cacr`, `dystress` (a cosine
temperature of the similarity), `dcl`, `balanced`. `causal` encodes the captions with the causal transformer of CLIP
instead of a small BERT.
"""

from ml_collections import ConfigDict

from configs import base, cc3m

VARIANTS = {
  **cc3m.VARIANTS,
  'dystress': {'loss': dict(name='info_nce'), 'temperature': dict(name='cosine', tau_min=0.07, tau_max=0.2)},
  'dcl': {'loss': dict(name='decoupled'), 'temperature': dict(name='learnable', tau=0.07)},
  'balanced': {'loss': dict(name='balanced', alpha=10.0, lam=1.0), 'temperature': dict(name='none')},
  'causal': {'method.text': dict(name='clip_text_tiny', width=64, depth=2, heads=4, vocabulary=200, positions=16)},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.source, config.data.name = 'embedded', 'embedded'
  config.data.tokens = 14
  config.dtype = 'float32'
  config.steps, config.batch_size = 2000, 64
  config.views = 1
  # No crops and no flips: captions state where the shape is, and would become wrong.
  config.augment = dict(name='none', crop=False, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
  config.model = dict(name='resnet_tiny', width=16)
  config.projector = dict(name='clip', features=(64,))
  config.method = dict(
    name='image_text',
    text=dict(name='bert_tiny', width=64, depth=1, heads=2, pooling='mean', dropout=0.0, vocabulary=200, positions=16),
  )
  config.temperature = dict(name='learnable', tau=0.07)
  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 2e-3  # at 5e-3, results are not stable
  config.optimizer.weight_decay = 0.1
  config.optimizer.exempt = True
  config.optimizer.warmup_epochs = 0.5
  config.parallel.cpu_devices = 2
  config.eval.at_start = True
  config.eval.every_epochs = 2
  config.eval.k = ()
  config.eval.linear = ''
  config.eval.retrieval = 1000
  return base.options(config, arg, VARIANTS)
