"""STL-10, the small AlexNet, CACR with four positives (CACR C.1), 200 epochs on 105,000 images, without labels.

  python main.py --config=configs/stl10.py --workdir=runs/stl10

Views of 64 pixels are cropped from images of 96 pixels. kNN and classifiers use the 5,000 labeled training images.
Options: one positive (`cacr_k1`), CMC with four (`cmc`), and other losses with one positive (`cl`, `au_cl`, `hn_cl`).
"""

from ml_collections import ConfigDict

from configs import base, cifar10

CL = {'loss': dict(name='info_nce'), 'temperature': dict(name='constant', tau=0.19)}
K1 = {'views': 2, 'batch_size': 768, 'method': dict(name='simclr')}

VARIANTS = {
  'cacr': {
    **cifar10.VARIANTS['cacr'],
    'augment': dict(name='cacr_stl10'),
    'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0),
  },
  # This option and those below are changes to `cacr`.
  'cacr_k1': {'views': 2, 'batch_size': 768, 'loss': dict(name='cacr', t_pos=1.0, t_neg=3.0)},
  'cmc': {'method': dict(name='cmc'), **CL},
  'cl': {**K1, **CL},
  'au_cl': {**K1, 'loss': dict(name='align_uniform', t=2.0)},
  'hn_cl': {
    **K1,
    'loss': dict(name='hard_negative', beta=1.0, tau_plus=0.1),  # tau_plus is from HCL's code
    'temperature': dict(name='constant', tau=0.5),
  },
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.name = 'stl10'
  config.data.train_split = 'train+unlabelled'
  config.data.image_size, config.data.stored_size = 64, 96
  config.eval.data.train_split = 'train'
  config.eval.crop = 64 / 70  # Wang & Isola 2020: the center of 70 pixels
  config.eval.linear = 'cacr_small_as_is'  # as in the authors' code
  return base.options(config, f'cacr,{arg}', VARIANTS)
