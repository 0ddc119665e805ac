"""CIFAR-10, ResNet-18, SimCLR at tau 0.2, 200 epochs.

  python main.py --mode=prepare --config=configs/cifar10.py  # once: downloads CIFAR-10
  python main.py --config=configs/cifar10.py --workdir=runs/cifar10

About 6 minutes on one H200; kNN-200 accuracy at the last epoch: 84 % or more. Variants follow a colon
(`--config=configs/cifar10.py:dystress,seed=1`, see VARIANTS) and combine, later ones overriding earlier ones:
`:moco,dystress`, `:dcl,dystress`, `:simsiam,multi_crop`, `:byol,ema`.
"""

from ml_collections import ConfigDict

from configs import base

NONE, TENTH = dict(name='none'), dict(name='constant', tau=0.1)
MOCO = dict(name='moco', queue=4096, momentum=0.99)
# Sums over many features have gradients of very different sizes: Adam with warm-up replaces the papers' LARS.
ADAM = dict(name='adamw', learning_rate=1e-3, weight_decay=1e-6, warmup_epochs=2.0)
REDUNDANCY = {
  'method': dict(name='redundancy'),
  'projector': dict(name='barlow_twins', features=(2048, 2048, 2048)),
  'temperature': NONE,
  'optimizer': ADAM,
}
WANG_LIU = {
  'views': 1,
  'augment': dict(name='cacr_small'),  # sec. 5.1, as Wu et al. 2018: crops of 0.2 to 1, jitter always, including hue
  'projector': dict(name='moco', features=(128,)),
  'temperature': dict(name='constant', tau=0.3),
  'optimizer': dict(learning_rate=0.03, schedule='step', milestones=(160, 190)),
}
CACR_SMALL = {
  'model': dict(name='alexnet_small'),
  'projector': dict(name='alexnet'),
  'augment': dict(name='cacr_small'),
  'optimizer': dict(
    learning_rate=0.12, scaling='linear', weight_decay=1e-4, schedule='step', milestones=(155, 170, 185)
  ),
}

VARIANTS = {
  # Fewer images of the later classes (CIFAR-LT, DySTreSS Table 4), or of the earlier ones (CACR 5.1).
  'long_tail': {
    'imbalance': dict(name='exponential_tail', ratio=0.01),
    'epochs': 500,
    'eval.k': (1, 10),
    'eval.vote': 'distance',
  },
  # CACR's exponential rule keeps no image of the first class, so the classifier is trained on all images.
  'linear_imbalance': {'imbalance': dict(name='linear_imbalance'), 'eval.train_images': 'all'},
  'exponential_imbalance': {'imbalance': dict(name='exponential_imbalance'), 'eval.train_images': 'all'},
  # A temperature that depends on the similarity (DySTreSS, Alg. 1).
  'dystress': {'temperature': dict(name='cosine', tau_min=0.07, tau_max=0.2)},
  # The batch size of Lee 2025, A.4, and of most peers; the learning rate grows with it.
  'batch512': {'batch_size': 512, 'optimizer.learning_rate': 0.24},
  # For any method: extra small views of each image, evaluation of averaged weights, and fewer epochs to an accuracy
  # (experiments/speedrun).
  'multi_crop': {'small_crops': dict(number=4, size=16, scale=(0.05, 0.3)), 'augment.crop_scale': (0.3, 1.0)},
  'ema': {'ema': 0.999},
  'muon': {
    'optimizer': dict(name='muon', learning_rate=0.02, momentum=0.95, weight_decay=0.05, warmup_epochs=5.0),
  },
  # Kukleva et al. 2023; Yeh et al. 2022 (twice); Huang et al. 2023; Wang & Isola 2020; Robinson et al. 2021.
  'kukleva': {'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=400)},
  'dcl': {'loss': dict(name='decoupled'), 'temperature': TENTH},
  'dclw': {'loss': dict(name='decoupled_weighted', sigma=0.5), 'temperature': TENTH},
  'macl': {'loss': dict(name='macl', tau0=0.1, alpha=0.5), 'temperature': NONE},
  'align_uniform': {'loss': dict(name='align_uniform', t=2.0), 'temperature': NONE},
  'hard_negative': {
    'loss': dict(name='hard_negative', beta=1.0, tau_plus=0.1),  # tau_plus: of HCL's code
    'temperature': dict(name='constant', tau=0.5),
  },
  # Qiu et al. 2023: one learned temperature per image.
  'isogclr': {'method': dict(name='isogclr'), 'loss': dict(name='robust_contrastive', rho=0.3), 'temperature': NONE},
  # Lee 2025, A.4: alpha and lam of its CIFAR-10 rows. The paper prints no schedule, and a constant learning rate gives
  # its numbers (experiments/balanced); optimizer.schedule=cosine is the variant.
  'balanced': {
    'batch_size': 512,
    'augment': dict(name='balanced_cifar'),
    'projector': dict(name='balanced_cifar'),
    'loss': dict(name='balanced', alpha=2.0, lam=4.0),
    'temperature': NONE,
    'optimizer': dict(learning_rate=0.1, weight_decay=1e-4, schedule='constant'),
  },
  # CACR, App. C: AlexNet; K = 4 positives at batch 128, or one at batch 768; CMC contrasts the same views.
  'cacr': {
    **CACR_SMALL,
    'views': 5,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=0.9),
    'temperature': NONE,
  },
  'cacr_k1': {
    **CACR_SMALL,
    'batch_size': 768,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0),
    'temperature': NONE,
  },
  'cmc': {
    **CACR_SMALL,
    'views': 5,
    'method': dict(name='cmc'),
    'temperature': dict(name='constant', tau=0.19),
  },
  # He et al. 2020 and Chen et al. 2020, with a queue that suits 50,000 images; CACR on it is CACR's Alg. 3.
  'moco': {'method': MOCO, 'projector': dict(name='moco'), 'temperature': TENTH},
  'cacr_moco': {
    'views': 5,
    'method': dict(MOCO, symmetric=True, intra_batch=True),
    'projector': dict(name='moco'),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0, stop_positive_weights=True),
    'temperature': NONE,
  },
  # The authors' predictor for a ResNet ends without a norm.
  'moco_v3': {
    'method': dict(name='moco_v3', predictor=dict(batch_norm='hidden', last_bias=False)),
    'projector': dict(name='moco_v3'),
  },
  # Huynh et al. 2022, with fewer views and a queue that suits 50,000 images.
  'fnc': {
    'views': 4,
    'method': dict(name='fnc', queue=4096, momentum=0.99),
    'loss': dict(name='fnc'),
    'temperature': TENTH,
  },
  # Wang & Liu 2021, sec. 5: one view, a linear head; the negatives are the whole bank or its hardest 8.19 %.
  'memory_bank': {**WANG_LIU, 'method': dict(name='memory_bank', negatives=0)},
  'memory_bank_hard': {**WANG_LIU, 'method': dict(name='memory_bank'), 'loss': dict(name='hard', fraction=0.0819)},
  # Without negatives. The heads are those of the papers, made narrower for a ResNet-18.
  'byol': {
    'method': dict(name='byol', predictor=dict(features=(1024, 256))),
    'projector': dict(name='byol', features=(1024, 256)),
    'loss': dict(name='byol'),
    'temperature': NONE,
  },
  'simsiam': {
    'method': dict(name='simsiam'),
    'projector': dict(name='simsiam', features=(2048, 2048)),  # Chen & He 2021, App. D: two layers on CIFAR
    'loss': dict(name='simsiam'),
    'temperature': NONE,
  },
  'barlow_twins': {**REDUNDANCY, 'loss': dict(name='barlow_twins', lam=0.0051)},
  'vicreg': {**REDUNDANCY, 'loss': dict(name='vicreg')},
  'zero_cl': {**REDUNDANCY, 'loss': dict(name='zero_cl'), 'projector': dict(name='barlow_twins', features=(512, 64))},
  'arb': {**REDUNDANCY, 'loss': dict(name='arb'), 'projector': dict(name='barlow_twins', features=(512, 64))},
  # Ermolov et al. 2021, sec. 4: Adam at 3e-3, and 64 dimensions, which 128 images can whiten.
  'w_mse': {
    **REDUNDANCY,
    'loss': dict(name='w_mse'),
    'projector': dict(name='barlow_twins', features=(1024, 64)),
    'optimizer': dict(ADAM, learning_rate=3e-3),
  },
  # Tong et al. 2023: 20 crops of half the side, and features that are the mean over crops. Their optimizer is LARS.
  'emp_ssl': {
    **REDUNDANCY,
    'views': 20,
    'batch_size': 100,
    'epochs': 30,
    'method': dict(name='emp_ssl'),
    'loss': dict(name='emp_ssl'),
    'projector': dict(name='barlow_twins', features=(4096, 4096, 1024)),
    'augment': dict(name='emp_ssl'),
    'eval.patches': 5,
    'eval.patch': 0.5,
    'eval.flip': True,
    'eval.batch_size': 250,
  },
  'dino': {
    'method': dict(
      name='dino',
      momentum=0.99,
      teacher_temperature=dict(name='linear_schedule', start=0.04, end=0.07, epochs=30),
    ),
    'projector': dict(name='dino', features=(2048, 256), prototypes=4096, batch_norm='hidden'),
    'loss': dict(name='dino'),
    'temperature': TENTH,
  },
  'swav': {
    'method': dict(name='swav', predictor=dict(number=512), queue=0),  # experiments/baselines: why no queue
    'projector': dict(name='swav', features=(512, 128)),
    'loss': dict(name='swav'),
    'temperature': TENTH,
    'optimizer': ADAM,
  },
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.name = 'cifar10'
  config.model = dict(name='resnet18_cifar')
  config.augment = dict(name='dystress_cifar')
  return base.options(config, arg, VARIANTS)
