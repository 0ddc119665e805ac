"""DySTreSS (Manna et al. 2024) on sentence embeddings: Table 12, and four of its rows trained from scratch.

python -m experiments.sentences.sweep --budget-minutes=25
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments import runner
from experiments.tables import Column, Row, Sweep

CONFIG = 'configs/sentences.py'
SETS = ('sts12', 'sts13', 'sts14', 'sts15', 'sts16', 'stsb', 'sickr')
TRANSFER = ('mr', 'cr', 'subj', 'mpqa', 'sst2', 'trec', 'mrpc')
# The lower half of Table 12: accuracies on TRANSFER, then their mean.
ACCURACIES = {
  'simcse': (80.42, 85.80, 94.13, 88.66, 85.17, 87.40, 72.29, 84.84),
  'macl': (80.50, 85.41, 94.20, 89.22, 85.06, 90.40, 75.59, 85.77),
  'dystress': (81.30, 87.10, 94.79, 89.15, 86.16, 88.20, 72.35, 85.58),
  'shifted_2': (81.72, 86.76, 94.34, 88.31, 86.33, 88.00, 73.74, 85.60),
  'shifted_4': (81.69, 87.28, 94.80, 89.29, 85.83, 91.20, 72.93, 86.15),
  'shifted_6': (81.62, 86.68, 94.74, 88.75, 86.71, 90.40, 75.30, 86.31),
  'shifted_4_0.02_0.05': (81.59, 86.99, 94.45, 89.48, 86.66, 87.80, 74.90, 85.98),
  'shifted_4_0.05_0.07': (80.69, 85.94, 94.27, 89.16, 84.84, 89.20, 74.61, 85.53),
  'shifted_4_0.04_0.05': (81.02, 86.23, 94.97, 88.86, 85.17, 89.80, 73.22, 85.61),
}


def row(name: str, title: str, config: str, numbers: Sequence[float], changes: dict | None = None, **more) -> Row:
  """`numbers`: the published correlations on SETS, then their published mean."""
  published = dict(zip([f'spearman_{key}' for key in (*SETS, 'mean')], numbers, strict=True))
  published |= dict(zip([f'transfer_{key}' for key in (*TRANSFER, 'mean')], ACCURACIES[name], strict=True))
  # Weights and vocabulary of bert-base-uncased.
  pretrained = {'init': 'text/bert.safetensors', 'data.vocabulary': 'text/vocab.txt'}
  more = dict(published=published, minutes=12, shows=('Table 12',), **more)
  return Row(name, title, config, pretrained | (changes or {}), **more)


def starred(tau_min: float, tau_max: float, numbers: Sequence[float]) -> Row:
  changes = {'temperature.tau_min': tau_min, 'temperature.tau_max': tau_max}
  title = f'DySTreSS*, Δs = −0.4, k = 0.7, {tau_min} to {tau_max}'
  return row(f'shifted_4_{tau_min}_{tau_max}', title, f'{CONFIG}:shifted_4', numbers, changes, further=True)


TABLE_12 = (
  row('simcse', 'SimCSE, τ = 0.05', CONFIG, (65.10, 80.32, 71.42, 80.51, 77.80, 76.47, 70.69, 74.62)),
  row(
    'dystress', 'DySTreSS, 0.03 to 0.05', f'{CONFIG}:dystress', (68.00, 81.58, 73.44, 80.33, 77.65, 76.24, 70.98, 74.80)
  ),
  row(
    'shifted_4',
    'DySTreSS*, Δs = −0.4, k = 0.7, 0.03 to 0.05',
    f'{CONFIG}:shifted_4',
    (69.34, 81.76, 73.51, 81.61, 77.39, 76.67, 71.53, 75.96),
  ),
  row(
    'shifted_2',
    'DySTreSS⁺, Δs = −0.2, k = 0.6, 0.03 to 0.05',
    f'{CONFIG}:shifted_2',
    (70.19, 81.61, 73.89, 81.91, 77.36, 77.06, 70.01, 76.00),
  ),
  row(
    'shifted_6',
    'DySTreSS**, Δs = −0.6, k = 0.8, 0.03 to 0.05',
    f'{CONFIG}:shifted_6',
    (69.65, 79.18, 72.37, 80.79, 76.83, 75.59, 71.43, 75.12),
  ),
  row('macl', 'MACL, τ₀ = 0.05', f'{CONFIG}:macl', (67.49, 81.55, 73.21, 80.97, 77.52, 76.54, 70.87, 74.84)),
  starred(0.02, 0.05, (69.17, 81.69, 73.73, 81.38, 77.75, 76.19, 70.98, 75.84)),
  starred(0.05, 0.07, (69.02, 80.61, 73.81, 81.39, 79.75, 77.97, 72.05, 76.37)),
  starred(0.04, 0.05, (69.68, 80.33, 74.27, 80.55, 76.89, 75.95, 70.82, 75.50)),
)


SCRATCH = ('simcse', 'dystress', 'shifted_4', 'macl')
SMALL = {'model.name': 'bert_small', 'model.pooling': 'mean'}


def from_scratch(pretrained: Row) -> Row:
  """A small BERT trained from scratch, with a vocabulary built from the sentences; the paper has no such row."""
  changes = {key: value for key, value in pretrained.changes.items() if key not in ('init', 'data.vocabulary')}
  changes |= SMALL | {'optimizer.learning_rate': 5e-4}
  names = dict(name=f'scratch_{pretrained.name}', title=f'{pretrained.title}, small BERT from scratch')
  more = dict(seeds=(0, 1, 2), published={}, minutes=3, further=True, shows=())
  return dataclasses.replace(pretrained, **names, changes=changes, **more)


# The same encoder before training: what the scores of the other rows from scratch have to exceed.
UNTRAINED = Row(
  'scratch_untrained',
  'untrained small BERT',
  CONFIG,
  {'init': 'random'} | SMALL,
  seeds=(0, 1, 2),
  minutes=2,
  further=True,
  mode='evaluate',
)

SWEEP = Sweep(
  title='Dynamically Scaled Temperature in Self-Supervised Contrastive Learning (DySTreSS), sentences',
  protocol=(
    'One epoch over a million sentences of Wikipedia (from scratch: 260,000), batch 64, 32 tokens, last step. '
    'Spearman correlation (× 100) between the cosine similarity of sentence pairs and human similarity scores, over '
    'all parts of a set together. '
    'Features: [CLS] before the pooler (from scratch: mean over tokens). Test split if a set has one. '
    'Transfer: accuracy (%) of logistic regression on the same features, as they are, by the protocol of SentEval.'
  ),
  rows=(*TABLE_12, *(from_scratch(row) for row in TABLE_12 if row.name in SCRATCH), UNTRAINED),
  columns=(
    *(Column(f'spearman_{name}', name) for name in ('mean', *SETS)),
    *(Column(f'transfer_{name}', f'transfer {name}' if name == 'mean' else name) for name in ('mean', *TRANSFER)),
  ),
  common={'data.path': 'text/sentences.txt', 'eval.sts': 'text/sts', 'eval.transfer': 'text/transfer'},
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)
