"""Measures of a representation, computed from features alone or from features and labels.

Shapes: features [n, d]; views [v, n, d], v augmented views of the same n images; labels [n], integers. Features are
L2-normalized first, as in the papers, unless a docstring says otherwise. A pair is two different examples: no example
is compared with itself. Pairwise measures are computed in blocks of rows and averaged in float64. The order of
summation is fixed, so results are reproducible.
"""

from ssl_jax.evals.metrics.classes import (
  attracting_gap,
  inter_class_uniformity,
  prototype_bias,
  prototype_bias_sampled,
  repelling_gap,
  same_label_partners,
  same_label_similarity,
  tolerance,
)
from ssl_jax.evals.metrics.geometry import (
  alignment,
  alpha_req,
  lidar,
  modality_gap,
  rankme,
  uniformity,
)
from ssl_jax.evals.metrics.negatives import (
  conditional_entropy,
  local_separation,
  penalty_distribution,
  penalty_entropy,
  similarity_histograms,
)

__all__ = [
  'alignment',
  'alpha_req',
  'attracting_gap',
  'conditional_entropy',
  'inter_class_uniformity',
  'lidar',
  'local_separation',
  'modality_gap',
  'penalty_distribution',
  'penalty_entropy',
  'prototype_bias',
  'prototype_bias_sampled',
  'rankme',
  'repelling_gap',
  'same_label_partners',
  'same_label_similarity',
  'similarity_histograms',
  'tolerance',
  'uniformity',
]
