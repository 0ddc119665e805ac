r"""CC3M: image-text pretraining, ResNet-50, 32 epochs, batch 2,048, AdamW (CACR, Table 19).

  python main.py --config=configs/cc3m.py:clip --config.data.path=DIR --config.data.vocabulary=tokenizer.json \
    --workdir=runs/cc3m_clip

DIR has tar shards with KEY.jpg and KEY.txt, as img2dataset writes them. tokenizer.json is CLIP's; without it, the
vocabulary consists of the most frequent words. Retrieval on the pairs of the validation shards is evaluated during
training. The zero-shot accuracy of the table is measured on ImageNet's validation images:

  python main.py --mode=evaluate --workdir=runs/cc3m_clip --config.eval.data.name=imagenet2012 \
    --config.eval.data.source=tfds --config.eval.data.test_split=validation --config.eval.class_names=names.txt

names.txt has a line `WNID<TAB>name` for each class. Losses: `clip` (19.2 in the table), `siglip`, `cacr` (22.7),
`dystress`. Settings that the paper does not report are those of open_clip: weight decay, betas, a warm-up of one epoch,
the crops and both encoders, except that the ResNet-50 is torchvision's, and that evaluations resize images bilinearly.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = {
  'clip': {'loss': dict(name='info_nce'), 'temperature': dict(name='learnable', tau=0.07)},
  'siglip': {'loss': dict(name='sigmoid', bias=-10.0), 'temperature': dict(name='learnable', tau=0.1)},
  'cacr': {'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0), 'temperature': dict(name='none')},
  'dystress': {'loss': dict(name='info_nce'), 'temperature': dict(name='cosine', tau_min=0.03, tau_max=0.1)},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.source, config.data.name = 'tar', 'cc3m'
  config.data.train_split, config.data.test_split = 'cc3m-train-*.tar', 'cc3m-val-*.tar'
  config.data.image_size = 224
  config.data.tokens = 77
  config.data.workers = 16
  config.data.broken = 'skip'
  config.epochs, config.batch_size = 32, 2048
  config.views = 1
  # Random crops of at least 90 % of the area and no flips, as in open_clip; mean and standard deviation are CLIP's.
  config.augment = dict(
    name='none',
    crop=True,
    crop_scale=(0.9, 1.0),
    interpolation='bicubic',
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
  )
  config.model = dict(name='resnet50')
  config.projector = dict(name='clip')
  config.method = dict(name='image_text', text=dict(name='clip_text'))
  config.temperature = dict(name='learnable', tau=0.07)
  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.betas = (0.9, 0.999)  # open_clip has 0.98 only for a ViT
  config.optimizer.weight_decay = 0.1
  config.optimizer.exempt = True
  config.optimizer.warmup_epochs = 1.0
  config.eval.every_epochs = 4
  config.eval.k = ()
  config.eval.linear = ''
  return base.options(config, arg, VARIANTS)
