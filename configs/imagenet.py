"""ImageNet-1K, ResNet-50, SimCLR, 100 epochs (DySTreSS): LARS at 0.075·sqrt(batch), warm-up, cosine, bf16, 224 px.

  python main.py --config=configs/imagenet.py --config.data.path=/data/imagenet

`data.path` holds `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`, or a prepared tfds `imagenet2012`; an empty path is the
default tfds folder. Host workers decode and crop: set `data.workers` to the number of cores. The options are the
papers' recipes at this scale. `--mode=evaluate` trains linear classifiers on features of unaugmented images. The papers
train them on random crops and flips, which reads all images in each epoch: set `--config.eval.finetune=linear`.
"""

from ml_collections import ConfigDict

from configs import base

NONE = dict(name='none')
ZERO_INIT = dict(name='resnet50', zero_init_residual=True)  # each residual block starts as its shortcut
ON_IMAGENET = dict(source='imagenet', name='imagenet', train_split='train', test_split='val')
SGD = dict(name='sgd', scaling='none', weight_decay=1e-4, exempt=False, warmup_epochs=0.0)
LEE = {
  'batch_size': 512,
  'epochs': 100,
  'augment': dict(name='balanced_imagenet'),
  'projector': dict(name='balanced_imagenet'),
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
# MoCo v3 (Chen, Xie & He 2021), with the epochs of CACR's Table 18. For a ResNet-50, tau and other settings are from
# the authors' code for 1,000 epochs, the closest number for which it has any (for 300 epochs: weight decay 1e-6 and
# momentum 0.99). Each step has 4,096 images, which needs many devices; the learning rate scales with `batch_size`.
MOCO_V3 = {
  'batch_size': 4096,
  'epochs': 800,
  'augment': dict(name='byol_1', interpolation='bilinear', crop_scale=(0.2, 1.0)),
  'augment_other': dict(blur=0.1, solarize=0.2),
  'model': ZERO_INIT,
  'method': dict(name='moco_v3', momentum=0.996, predictor=dict(batch_norm='hidden', last_bias=False)),
  'projector': dict(name='moco_v3'),
  'temperature': dict(name='constant', tau=1.0),
  'optimizer': dict(
    name='lars', scaling='linear', learning_rate=0.3, weight_decay=1.5e-6, exempt=True, warmup_epochs=10.0
  ),
  'eval.linear': 'cacr_large',
}
MOCO_V3_VIT = {
  **MOCO_V3,
  'epochs': 300,
  'augment': dict(name='byol_1', interpolation='bilinear'),
  'model': dict(name='vit_b16'),
  'method': dict(name='moco_v3', momentum=0.99),
  'projector': dict(name='moco_v3_vit'),
  'temperature': dict(name='constant', tau=0.2),
  'optimizer': dict(
    name='adamw', scaling='linear', learning_rate=1.5e-4, weight_decay=0.1, exempt=False, warmup_epochs=40.0
  ),
}


def cacr_v3(recipe):
  """CACR with K = 4 positives per query on MoCo v3. Table 18 gives no K, t⁺ or t⁻; these are the values for MoCo v2."""
  return {
    **recipe,
    'views': 5,
    'method': dict(recipe['method'], keys_together=True),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0, stop_positive_weights=True),
    'temperature': NONE,
  }


# DySTreSS Tables 1 and 2 compare with lightly's benchmark, from which the learning rates are taken. lightly's LARS uses
# another learning rate for the biases and norms of Barlow Twins, and applies momentum before the learning rate. Ours
# does neither.
BYOL = {
  'temperature': NONE,
  'augment': dict(name='byol_1'),
  'augment_other': dict(blur=0.1, solarize=0.2),
  'optimizer': dict(scaling='linear', learning_rate=0.2),
}
# Barlow Twins. The other methods of DySTreSS Table 8 use the same views and optimizer.
REDUNDANCY = {
  **BYOL,
  'method': dict(name='redundancy'),
  'optimizer': dict(scaling='linear', learning_rate=0.2, weight_decay=1.5e-6),
}


def _head(*features):
  return dict(name='barlow_twins', features=features)


VARIANTS = {
  # DySTreSS, Tables 1 and 2; `shifted` is DySTreSS* (shift -0.4, scale 0.7); `kukleva` is in Table 5.
  'simclr': {'temperature': dict(name='constant', tau=0.1)},
  'dystress': {'temperature': dict(name='cosine', tau_min=0.1, tau_max=0.2)},
  'shifted': {'temperature': dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=-0.4, scale=0.7)},
  'dcl': {'loss': dict(name='decoupled'), 'temperature': dict(name='constant', tau=0.1)},
  'dclw': {'loss': dict(name='decoupled_weighted', sigma=0.5), 'temperature': dict(name='constant', tau=0.1)},
  'macl': {'loss': dict(name='macl', tau0=0.1, alpha=0.5), 'temperature': NONE},
  # One period is the length of training. In Kukleva's code it is 400 epochs: these runs would cover half of it or less,
  # and the temperature would only fall. DySTreSS trains the long-tailed set for 2,000 epochs (sec. 5.4).
  'kukleva': {'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0)},
  'byol': {
    **BYOL,
    'method': dict(name='byol', momentum=0.99),
    'projector': dict(name='byol'),
    'loss': dict(name='byol'),
    'optimizer': dict(scaling='linear', learning_rate=0.45),
  },
  'barlow_twins': {
    **REDUNDANCY,
    'projector': dict(name='barlow_twins'),
    'loss': dict(name='barlow_twins', lam=0.005),
  },
  'vicreg': {
    **BYOL,
    'method': dict(name='redundancy'),
    'projector': dict(name='vicreg'),
    'loss': dict(name='vicreg', variance=12.5),
  },
  # Zero-ICL (Zhang et al. 2022), with the width of DySTreSS Table 8.
  'zero_icl': {**REDUNDANCY, 'projector': _head(2048, 2048, 256), 'loss': dict(name='zero_cl', kind='instance')},
  # Zero-FCL (Zhang et al. 2022), with the width of DySTreSS Table 8.
  'zero_fcl': {**REDUNDANCY, 'projector': _head(2048, 2048, 2048), 'loss': dict(name='zero_cl', kind='feature')},
  # Zero-CL (Zhang et al. 2022), with the width of DySTreSS Table 8.
  'zero_cl': {**REDUNDANCY, 'projector': _head(2048, 2048, 2048), 'loss': dict(name='zero_cl')},
  # W-MSE (Ermolov et al. 2021). A batch of 128 images cannot whiten the 256 features of DySTreSS Table 8, so the width
  # is 64, as in solo-learn, whose numbers the table repeats.
  'w_mse': {**REDUNDANCY, 'projector': _head(1024, 64), 'loss': dict(name='w_mse')},
  # ARB (Zhang et al. 2022), with the width of DySTreSS Table 8.
  'arb': {**REDUNDANCY, 'projector': _head(2048, 2048, 2048), 'loss': dict(name='arb')},
  # The epochs and batch size of DySTreSS Table 8; combine with any option above.
  'epochs400': {'epochs': 400, 'batch_size': 128},
  # SwAV (Caron et al. 2020) at batch 256; combine with multi_crop.
  'swav': {
    'method': dict(name='swav', queue=3840, queue_epochs=15),
    'projector': dict(name='swav'),
    'loss': dict(name='swav'),
    'temperature': dict(name='constant', tau=0.1),
    'optimizer': dict(scaling='linear', learning_rate=0.6),
  },
  # DINO (Caron et al. 2021) for a ResNet-50; combine with multi_crop. The authors blur half of the small crops; here
  # they are blurred like the first view.
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
  # Lee 2025, A.3: NT-Xent.
  'nt_xent': {**LEE, 'temperature': dict(name='constant', tau=0.5)},
  # Lee 2025, A.3: the balanced loss.
  'balanced': {**LEE, 'loss': dict(name='balanced', alpha=4.0, lam=2.0), 'temperature': NONE},
  # CACR C.2: MoCo v2.
  'moco': {**MOCO, 'views': 2, 'loss': dict(name='info_nce'), 'temperature': dict(name='constant', tau=0.2)},
  # A baseline of CACR on MoCo v2 (Table 15); settings that the paper does not report are from the authors' code. Wang &
  # Isola weight alignment by 3. The loss here is a third of theirs, so it has three times the learning rate and a third
  # of the weight decay.
  'align_uniform_moco': {
    **MOCO,
    'views': 2,
    'method': dict(MOCO['method'], intra_batch=True),
    'loss': dict(name='align_uniform', t=3.0, weight=1 / 3),
    'temperature': NONE,
    'optimizer': dict(SGD, learning_rate=0.09, weight_decay=1e-4 / 3),
  },
  # A baseline of CACR on MoCo v2 (Table 15); settings that the paper does not report are from the authors' code.
  'hard_negative_moco': {
    **MOCO,
    'views': 2,
    'loss': dict(name='hard_negative', beta=1.0, tau_plus=0.1),
    'temperature': dict(name='constant', tau=0.5),
  },
  # CACR C.2: CACR on MoCo v2 with four positives.
  'cacr_moco': {**CACR_MOCO, 'views': 5},
  # CACR C.2: CACR on MoCo v2 with one positive.
  'cacr_moco_k1': {**CACR_MOCO, 'views': 2},
  # CACR C.2, "the main experiments", and Table 18: MoCo v3 with a ResNet-50 and with a ViT-B/16, and CACR on both.
  'moco_v3': MOCO_V3,
  'moco_v3_vit': MOCO_V3_VIT,
  'cacr_moco_v3': cacr_v3(MOCO_V3),
  'cacr_moco_v3_vit': cacr_v3(MOCO_V3_VIT),
  # CACR Table 15: CMC with four positives on MoCo v2, at the τ of C.2.
  'cmc_moco': {
    **MOCO,
    'views': 5,
    'method': dict(MOCO['method'], symmetric=True),
    'loss': dict(name='info_nce'),
    'temperature': dict(name='constant', tau=0.07),
  },
  # Baselines of CACR Tables 4, 16 and 18: `simsiam`, `simclr_v2` and `fnc`. SimSiam (Chen & He 2021) has half of the
  # authors' batch size of 512, as in Table 4.
  'simsiam': {
    'batch_size': 256,
    'augment': dict(name='moco_v2'),
    'model': ZERO_INIT,
    'method': dict(name='simsiam'),
    'projector': dict(name='simsiam'),
    'loss': dict(name='simsiam'),
    'temperature': NONE,
    'optimizer': dict(SGD, learning_rate=0.05, scaling='linear', fixed_predictor=True),
    'eval.linear': 'imagenet_lars',
  },
  # SimCLR v2 (Chen et al. 2020), without the paper's memory of 64K keys.
  'simclr_v2': {
    'batch_size': 4096,
    'epochs': 800,
    'model': ZERO_INIT,
    'projector': dict(name='simclr', features=(2048, 2048, 128)),
    'temperature': dict(name='constant', tau=0.1),
    'optimizer': dict(scaling='sqrt', learning_rate=0.1, weight_decay=1e-4, warmup_epochs=40.0),
  },
  # FNC (Huynh et al. 2022), with the settings of the authors' code: ten full-size views, a memory of 16 batches. The
  # authors' views also have RandAugment; ours do not. Four thousand images with ten views need several hosts.
  'fnc': {
    'batch_size': 4096,
    'views': 10,
    'model': ZERO_INIT,
    'method': dict(name='fnc', queue=6 * 4096, momentum=0.999),
    'projector': dict(name='simclr', features=(2048, 2048, 128)),
    'loss': dict(name='fnc'),
    'temperature': dict(name='constant', tau=0.1),
    'optimizer': dict(scaling='sqrt', learning_rate=0.1, weight_decay=1e-4),
    'parallel.processes': 8,
  },
  # CACR Table 5: pretraining on WebVision v1, linear classification of ImageNet-1K, whose folder is eval.data.path. Put
  # `moco`, `cacr_moco` or `cacr_moco_k1` before it. data.path holds train/google and train/flickr; labels are not used.
  'webvision': {'epochs': 100, 'data': dict(source='folder', name='webvision'), 'eval.data': ON_IMAGENET},
  # CACR Table 5: as `webvision`, with pretraining on ImageNet-22K, in train/WNID.
  'imagenet22k': {'epochs': 20, 'data': dict(source='folder', name='imagenet22k'), 'eval.data': ON_IMAGENET},
  # ImageNet-LT (Lee 2025, A.3.4); combine with any option above.
  'long_tail': {'imbalance': dict(name='pareto', total=115_846, n_max=1280, n_min=5, alpha=6.0)},
  # As many images as ImageNet-LT, from the balanced set (Lee 2025, A.3.4); combine with any option above.
  'uniform': {'imbalance': dict(name='uniform', total=115_846)},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.epochs = 100
  config.batch_size = 256
  config.data.source, config.data.name = 'imagenet', 'imagenet'
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
