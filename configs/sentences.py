r"""Sentence embeddings: unsupervised SimCSE (Gao et al. 2021), as in DySTreSS Table 12, with BERT for one epoch.

  python main.py --config=configs/sentences.py --config.data.path=wiki1m_for_simcse.txt --config.eval.sts=sts \
    --config.data.vocabulary=vocab.txt --config.init=bert.safetensors --workdir=runs/simcse

`vocab.txt` and the weights are those of bert-base-uncased. Without them, BERT is trained from scratch with a vocabulary
built from the sentences. Two views of a sentence differ only in dropout. Options: DySTreSS (`dystress`) and its
shifted temperatures (`shifted_2`, `shifted_4`, `shifted_6`), MACL (`macl`), and a small BERT for a laptop (`small`).
"""

from ml_collections import ConfigDict

from configs import base


def shifted(shift, scale):
  return {'temperature': dict(name='shifted_cosine', tau_min=0.03, tau_max=0.05, shift=shift, scale=scale)}


VARIANTS = {
  'dystress': {'temperature': dict(name='cosine', tau_min=0.03, tau_max=0.05)},
  'shifted_2': shifted(-0.2, 0.6),  # DySTreSS+
  'shifted_4': shifted(-0.4, 0.7),  # DySTreSS*
  'shifted_6': shifted(-0.6, 0.8),  # DySTreSS**
  # The values in MACL's code for sentences.
  'macl': {'loss': dict(name='macl', tau0=0.05, alpha=2.0, threshold=0.8), 'temperature': dict(name='none')},
  'small': {'model': dict(name='bert_tiny', pooling='mean'), 'optimizer.learning_rate': 5e-4, 'dtype': 'float32'},
}


def get_config(arg: str = '') -> ConfigDict:
  config = base.get_config()
  config.data.source, config.data.name = 'text', 'sentences'
  config.epochs, config.batch_size = 1, 64
  config.augment = dict(name='dropout')
  config.model = dict(name='bert_base')
  config.projector = dict(name='bert')
  # Each query has one positive and the negatives of the other view, in both directions; SimCSE has one direction only.
  config.method = dict(name='cmc')
  config.temperature = dict(name='constant', tau=0.05)
  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 3e-5
  config.optimizer.weight_decay = 0.0
  config.optimizer.schedule = 'linear'
  config.optimizer.clip = 1.0  # the default of the trainer in SimCSE's code
  config.eval.k = ()
  config.eval.linear = ''
  return base.options(config, arg, VARIANTS)
