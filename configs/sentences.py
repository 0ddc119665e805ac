"""Sentence embeddings, SimCSE without labels (Gao et al. 2021), as dystress Table 12 trains them: BERT, one epoch.

  python main.py --config=configs/sentences.py --config.data.path=wiki1m_for_simcse.txt --config.eval.sts=sts \
    --config.data.vocabulary=vocab.txt --config.init=bert.safetensors --workdir=runs/simcse

`vocab.txt` and the weights are those of bert-base-uncased; without both, a BERT is trained from scratch on a vocabulary
of the sentences. Two views of a sentence differ in dropout alone. Variants: DySTreSS (`dystress`) and its shifted
temperatures (`shifted_2`, `shifted_4`, `shifted_6`), MACL (`macl`), and a small BERT that a laptop trains (`small`).
"""

from configs import base


def shifted(shift, scale):
  return {'temperature': dict(name='shifted_cosine', tau_min=0.03, tau_max=0.05, shift=shift, scale=scale)}


VARIANTS = {
  'dystress': {'temperature': dict(name='cosine', tau_min=0.03, tau_max=0.05)},
  'shifted_2': shifted(-0.2, 0.6),  # DySTreSS with a plus
  'shifted_4': shifted(-0.4, 0.7),  # with a star
  'shifted_6': shifted(-0.6, 0.8),  # with two stars
  'macl': {'loss': dict(name='macl', tau0=0.05), 'temperature': dict(name='none')},
  'small': {'model': dict(name='bert_tiny', pooling='mean'), 'optimizer.learning_rate': 5e-4, 'dtype': 'float32'},
}


def get_config(arg=''):
  config = base.get_config()
  config.data.source, config.data.name = 'text', 'sentences'
  config.epochs, config.batch_size = 1, 64
  config.augment = dict(name='dropout')
  config.model = dict(name='bert_base')
  config.projector = dict(name='bert')
  # One positive, and the negatives of the other view; SimCSE goes from the first view to the second alone.
  config.method = dict(name='cmc')
  config.temperature = dict(name='constant', tau=0.05)
  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 3e-5
  config.optimizer.weight_decay = 0.0
  config.optimizer.schedule = 'linear'
  config.optimizer.clip = 1.0  # of the trainer that SimCSE's code uses
  config.eval.k = ()
  config.eval.linear = ''
  return base.options(config, arg, VARIANTS)
