"""Losses: functions of similarities (`contrastive`), of embeddings (`redundancy`) and of predictions (`distillation`).

>>> from_config(dict(name='balanced', alpha=2.0, lam=4.0)).takes_temperature
False
"""

from ssl_jax.losses.base import CONTRASTIVE, Loss, Properties, contrastive_loss, from_config, over_negatives
from ssl_jax.losses.cancellation import false_negatives, fnc
from ssl_jax.losses.contrastive import (
  align_uniform,
  balanced,
  decoupled,
  decoupled_weighted,
  generalized_nt_xent,
  hard,
  hard_negative,
  hard_simple,
  info_nce,
  macl,
  multi_positive,
  nt_xent,
  penalties,
  penalty_entropy,
  sigmoid,
  simple,
)
from ssl_jax.losses.distillation import byol, dino, dino_centre, simsiam, sinkhorn, swav
from ssl_jax.losses.redundancy import arb, barlow_twins, emp_ssl, vicreg, w_mse, zero_cl
from ssl_jax.losses.weighted import cacr, cacr_margin, triplet

__all__ = [
  'CONTRASTIVE',
  'Loss',
  'Properties',
  'align_uniform',
  'arb',
  'balanced',
  'barlow_twins',
  'byol',
  'cacr',
  'cacr_margin',
  'contrastive_loss',
  'decoupled',
  'decoupled_weighted',
  'dino',
  'dino_centre',
  'emp_ssl',
  'false_negatives',
  'fnc',
  'from_config',
  'generalized_nt_xent',
  'hard',
  'hard_negative',
  'hard_simple',
  'info_nce',
  'macl',
  'multi_positive',
  'nt_xent',
  'over_negatives',
  'penalties',
  'penalty_entropy',
  'sigmoid',
  'simple',
  'simsiam',
  'sinkhorn',
  'swav',
  'triplet',
  'vicreg',
  'w_mse',
  'zero_cl',
]
