"""ImageNet-1K, ResNet-50, SimCLR, 100 epochs (dystress 5.2): LARS at 0.075·sqrt(batch), warm-up, cosine, bf16, 224 px.

  python main.py --config=configs/imagenet.py --workdir=runs/imagenet --config.data.path=/data/imagenet

`data.path` holds `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`. Host workers decode and crop, so give it many cores and
as many workers (`--config.data.workers=16`). The variants are the papers' recipes at this scale; another folder of
images does as well. `--mode=evaluate` trains linear classifiers on features of the images as they are; those of the
papers see crops and flips, and then an epoch reads all images: `--config.eval.finetune=linear`.
"""

from configs import base

NONE = dict(name='none')
SGD = dict(name='sgd', scaling='none', weight_decay=1e-4, exempt=False, warmup_epochs=0.0)
SUPERVISED = {
  'batch_size': 512,
  'epochs': 100,
  'augment': dict(name='supervised_imagenet'),
  'projector': dict(name='supervised_imagenet'),
  'optimizer': dict(SGD, learning_rate=0.1),
  'eval.linear': 'imagenet_lars',
  'eval.k': (200,),
  'eval.vote': 'majority',
}
MOCO = {
  'batch_size': 256,
  'epochs': 200,
  'augment': dict(name='cacr_large'),
  'projector': dict(name='moco'),
  'method': dict(name='moco', queue=65536, momentum=0.999),
  'optimizer': dict(SGD, learning_rate=0.03),
  'eval.linear': 'cacr_large',
}
CACR_MOCO = {
  **MOCO,
  'method': dict(MOCO['method'], symmetric=True, intra_batch=True),
  'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0, stop_positive_weights=True),
  'temperature': NONE,
}
# Tables 1 and 2 of dystress compare with the benchmark of lightly, whose rates these are. Its LARS has another rate for
# the biases and norms of Barlow Twins, ours the same, and its momentum gathers updates before their rate.
BYOL = {
  'temperature': NONE,
  'augment': dict(name='byol_1'),
  'augment_other': dict(blur=0.1, solarize=0.2),
  'optimizer': dict(scaling='linear', learning_rate=0.2),
}

VARIANTS = {
  # dystress, Tables 1 and 2; `shifted` is its DySTreSS* (shift -0.4, scale 0.7); `kukleva` is of Table 5.
  'simclr': {'temperature': dict(name='constant', tau=0.1)},
  'dystress': {'temperature': dict(name='cosine', tau_min=0.1, tau_max=0.2)},
  'shifted': {'temperature': dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=-0.4, scale=0.7)},
  'dcl': {'loss': dict(name='decoupled'), 'temperature': dict(name='constant', tau=0.1)},
  'dclw': {'loss': dict(name='decoupled_weighted', sigma=0.5), 'temperature': dict(name='constant', tau=0.1)},
  'macl': {'loss': dict(name='macl', tau0=0.1, alpha=0.5), 'temperature': NONE},
  'kukleva': {'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=400)},
  'byol': {
    **BYOL,
    'method': dict(name='byol', momentum=0.99),
    'projector': dict(name='byol'),
    'loss': dict(name='byol'),
    'optimizer': dict(scaling='linear', learning_rate=0.45),
  },
  'barlow_twins': {
    **BYOL,
    'method': dict(name='redundancy'),
    'projector': dict(name='barlow_twins'),
    'loss': dict(name='barlow_twins', lam=0.005),
    'optimizer': dict(scaling='linear', learning_rate=0.2, weight_decay=1.5e-6),
  },
  'vicreg': {
    **BYOL,
    'method': dict(name='redundancy'),
    'projector': dict(name='vicreg'),
    'loss': dict(name='vicreg', variance=12.5),
  },
  # With multi_crop: Caron et al. 2020, for a batch of 256, and Caron et al. 2021, for a ResNet-50, which blurs half of
  # the small crops where ours blurs them as the first view.
  'swav': {
    'method': dict(name='swav', queue=3840, queue_epochs=15),
    'projector': dict(name='swav'),
    'loss': dict(name='swav'),
    'temperature': dict(name='constant', tau=0.1),
    'optimizer': dict(scaling='linear', learning_rate=0.6),
  },
  'dino': {
    'augment': BYOL['augment'],
    'augment_other': BYOL['augment_other'],
    'method': dict(name='dino', teacher_temperature=dict(name='linear_schedule', start=0.04, end=0.07, epochs=50)),
    'projector': dict(name='dino', prototypes=60_000, batch_norm='hidden'),
    'loss': dict(name='dino'),
    'temperature': dict(name='constant', tau=0.1),
    'optimizer': dict(name='sgd', scaling='linear', learning_rate=0.03, weight_decay=1e-4),
  },
  'multi_crop': {'small_crops': dict(number=6, size=96, scale=(0.05, 0.14)), 'augment.crop_scale': (0.14, 1.0)},
  # supervised A.3: NT-Xent, and the balanced loss.
  'nt_xent': {**SUPERVISED, 'temperature': dict(name='constant', tau=0.5)},
  'balanced': {**SUPERVISED, 'loss': dict(name='balanced', alpha=4.0, lam=2.0), 'temperature': NONE},
  # cacr C.2: MoCo v2, and CACR on it with four positives or one.
  'moco': {**MOCO, 'views': 2, 'loss': dict(name='info_nce'), 'temperature': dict(name='constant', tau=0.2)},
  # Its baselines on MoCo v2, Table 15, with what their authors' codes have beside the printed values. Wang & Isola
  # weigh alignment with 3: a third of that loss needs three times the rate and a third of the decay.
  'align_uniform_moco': {
    **MOCO,
    'views': 2,
    'method': dict(MOCO['method'], intra_batch=True),
    'loss': dict(name='align_uniform', t=3.0, weight=1 / 3),
    'temperature': NONE,
    'optimizer': dict(SGD, learning_rate=0.09, weight_decay=1e-4 / 3),
  },
  'hard_negative_moco': {
    **MOCO,
    'views': 2,
    'loss': dict(name='hard_negative', beta=1.0, tau_plus=0.1),
    'temperature': dict(name='constant', tau=0.5),
  },
  'cacr_moco': {**CACR_MOCO, 'views': 5},
  'cacr_moco_k1': {**CACR_MOCO, 'views': 2},
  # ImageNet-LT and as many images of the balanced set (supervised A.3.4); with any of the above.
  'long_tail': {'imbalance': dict(name='pareto', total=115_846, n_max=1280, n_min=5, alpha=6.0)},
  'uniform': {'imbalance': dict(name='uniform', total=115_846)},
}


def get_config(arg=''):
  config = base.get_config()
  config.epochs = 100
  config.batch_size = 256
  config.data.source, config.data.name, config.data.path = 'folder', 'imagenet', 'imagenet'
  config.data.test_split = 'val'
  config.data.image_size = 224
  config.data.on_device = 'no'
  config.data.workers = 16
  config.augment = dict(name='simclr_imagenet')
  config.model = dict(name='resnet50')
  config.optimizer.name = 'lars'
  config.optimizer.learning_rate, config.optimizer.scaling = 0.075, 'sqrt'
  config.optimizer.weight_decay = 1e-6
  config.optimizer.exempt = True
  config.optimizer.warmup_epochs = 10.0
  config.eval.crop = 0.875
  config.eval.linear = 'dystress_imagenet'
  config.eval.k = (20,)
  config.eval.batch_size = 500
  return base.options(config, arg, VARIANTS)
