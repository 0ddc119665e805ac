"""Validation of the choices in the config section `eval`, against the tables that implement them."""

from collections.abc import Mapping

from ssl_jax.evals import features, finetune, knn, linear
from ssl_jax.registry import require_choice

CHOICES = {
  'features': features.LAYERS,
  'train_images': ('kept', 'all'),
  'vote': knn.VOTES,
  'linear': linear.CHOICES,
  'finetune': finetune.CHOICES,
}


def check(settings: Mapping) -> None:
  """Raises a ValueError for an invalid choice in `config.eval`. The message suggests the nearest valid name.

  >>> check(dict(features='backbone', train_images='kept', vote='cosine', linear='ridge', finetune='linear 10%'))
  """
  for key, known in CHOICES.items():
    require_choice(f'eval.{key}', settings[key], known)
