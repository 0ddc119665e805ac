"""CIFAR-10, ResNet-18, SimCLR at tau 0.2, 200 epochs.

  python main.py --mode=prepare --config=configs/cifar10.py  # once: downloads CIFAR-10
  python main.py --config=configs/cifar10.py --workdir=runs/cifar10

This takes about 6 minutes on one H200; kNN-200 accuracy at the last epoch is 84 % or more. Options follow a colon
(`--config=configs/cifar10.py:dystress,seed=1`) and can be combined, with later ones overriding earlier
ones: `:moco,dystress`, `:dcl,dystress`, `:simsiam,multi_crop`, `:byol,ema`.
"""

from ml_collections import ConfigDict

from configs import base

NONE, TENTH = dict(name='none'), dict(name='constant', tau=0.1)
MOCO = dict(name='moco', queue=4096, momentum=0.99)
# Losses that sum over many features have gradients of very different scales, so Adam with warm-up replaces the papers'
# LARS.
ADAM = dict(name='adamw', learning_rate=1e-3, weight_decay=1e-6, warmup_epochs=2.0)
REDUNDANCY = {
  'method': dict(name='redundancy'),
  'projector': dict(name='barlow_twins', features=(2048, 2048, 2048)),
  'temperature': NONE,
  'optimizer': ADAM,
}
WANG_LIU = {
  'views': 1,
  'augment': dict(name='cacr_small'),  # sec. 5.1, as in Wu et al. 2018: crops of 0.2 to 1, jitter always, with hue
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
  # Fewer images of the later classes (CIFAR-LT, DySTreSS Tables 6 and 7).
  'long_tail': {
    'imbalance': dict(name='exponential_tail', ratio=0.01),
    'epochs': 500,
    'eval.k': (1, 10),
    'eval.vote': 'distance',
  },
  # Fewer images of the earlier classes (CACR 5.1). CACR's exponential rule keeps no image of the first class, so with
  # both rules the classifier is trained on all images.
  'linear_imbalance': {'imbalance': dict(name='linear_imbalance'), 'eval.train_images': 'all'},
  'exponential_imbalance': {'imbalance': dict(name='exponential_imbalance'), 'eval.train_images': 'all'},
  # A temperature that depends on the similarity (DySTreSS, Alg. 1).
  'dystress': {'temperature': dict(name='cosine', tau_min=0.07, tau_max=0.2)},
  # The batch size of Lee 2025, A.4, and of most other papers; the learning rate is scaled with it.
  'batch512': {'batch_size': 512, 'optimizer.learning_rate': 0.24},
  # For any method: extra small views of each image.
  'multi_crop': {'small_crops': dict(number=4, size=16, scale=(0.05, 0.3)), 'augment.crop_scale': (0.3, 1.0)},
  # For any method: evaluates averaged weights.
  'ema': {'ema': 0.999},
  # For any method: reaches an accuracy in fewer epochs (experiments/speedrun).
  'muon': {
    'optimizer': dict(name='muon', learning_rate=0.02, momentum=0.95, weight_decay=0.05, warmup_epochs=5.0),
  },
  # The temperature schedule of Kukleva et al. 2023.
  'kukleva': {'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=400)},
  # DCL (Yeh et al. 2022).
  'dcl': {'loss': dict(name='decoupled'), 'temperature': TENTH},
  # DCLW (Yeh et al. 2022).
  'dclw': {'loss': dict(name='decoupled_weighted', sigma=0.5), 'temperature': TENTH},
  # MACL (Huang et al. 2023).
  'macl': {'loss': dict(name='macl', tau0=0.1, alpha=0.5), 'temperature': NONE},
  # Alignment and uniformity (Wang & Isola 2020).
  'align_uniform': {'loss': dict(name='align_uniform', t=2.0), 'temperature': NONE},
  # HCL (Robinson et al. 2021).
  'hard_negative': {
    'loss': dict(name='hard_negative', beta=1.0, tau_plus=0.1),  # tau_plus is from HCL's code
    'temperature': dict(name='constant', tau=0.5),
  },
  # iSogCLR (Qiu et al. 2023): one learned temperature per image.
  'isogclr': {'method': dict(name='isogclr'), 'loss': dict(name='robust_contrastive', rho=0.3), 'temperature': NONE},
  # Lee 2025, A.4: alpha and lam of its CIFAR-10 rows. The paper reports no schedule; a constant learning rate gives
  # its numbers (experiments/balanced). optimizer.schedule=cosine is the alternative.
  'balanced': {
    'batch_size': 512,
    'augment': dict(name='balanced_cifar'),
    'projector': dict(name='balanced_cifar'),
    'loss': dict(name='balanced', alpha=2.0, lam=4.0),
    'temperature': NONE,
    'optimizer': dict(learning_rate=0.1, weight_decay=1e-4, schedule='constant'),
  },
  # CACR, App. C: AlexNet, K = 4 positives at batch 128.
  'cacr': {
    **CACR_SMALL,
    'views': 5,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=0.9),
    'temperature': NONE,
  },
  # CACR, App. C: AlexNet, one positive at batch 768.
  'cacr_k1': {
    **CACR_SMALL,
    'batch_size': 768,
    'method': dict(name='simclr', by_view_pair=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0),
    'temperature': NONE,
  },
  # CMC on the same views as `cacr` (CACR, App. C).
  'cmc': {
    **CACR_SMALL,
    'views': 5,
    'method': dict(name='cmc'),
    'temperature': dict(name='constant', tau=0.19),
  },
  # MoCo v2 (He et al. 2020 and Chen et al. 2020), with a queue that suits 50,000 images.
  'moco': {'method': MOCO, 'projector': dict(name='moco'), 'temperature': TENTH},
  # CACR on MoCo v2 (CACR, Alg. 3).
  'cacr_moco': {
    'views': 5,
    'method': dict(MOCO, symmetric=True, intra_batch=True),
    'projector': dict(name='moco'),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0, stop_positive_weights=True),
    'temperature': NONE,
  },
  # MoCo v3. As in the authors' code for a ResNet, the predictor has no norm after its last layer.
  'moco_v3': {
    'method': dict(name='moco_v3', predictor=dict(batch_norm='hidden', last_bias=False)),
    'projector': dict(name='moco_v3'),
  },
  # FNC (Huynh et al. 2022), with fewer views and a queue that suits 50,000 images.
  'fnc': {
    'views': 4,
    'method': dict(name='fnc', queue=4096, momentum=0.99),
    'loss': dict(name='fnc'),
    'temperature': TENTH,
  },
  # Wang & Liu 2021, sec. 5: one view, a linear head; the negatives are the whole memory bank.
  'memory_bank': {**WANG_LIU, 'method': dict(name='memory_bank', negatives=0)},
  # Wang & Liu 2021, sec. 5: the negatives are the hardest 8.19 % of the memory bank.
  'memory_bank_hard': {**WANG_LIU, 'method': dict(name='memory_bank'), 'loss': dict(name='hard', fraction=0.0819)},
  # This and the following methods have no negatives. Their heads are narrower than in the papers, for a ResNet-18.
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
  # W-MSE (Ermolov et al. 2021, sec. 4): Adam at 3e-3, and 64 dimensions, which a batch of 128 images can whiten.
  'w_mse': {
    **REDUNDANCY,
    'loss': dict(name='w_mse'),
    'projector': dict(name='barlow_twins', features=(1024, 64)),
    'optimizer': dict(ADAM, learning_rate=3e-3),
  },
  # EMP-SSL (Tong et al. 2023): 20 crops of half the image's side; features are means over crops. The paper uses LARS.
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
    'method': dict(name='swav', predictor=dict(number=512), queue=0),  # no queue: see experiments/baselines
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
