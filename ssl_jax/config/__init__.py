"""Loads and validates a config from a file and flags, before anything is compiled and before any data is loaded."""

from ssl_jax.config.loading import NAMED, changed, flatten, load, overridden, override, set_name, split_options
from ssl_jax.config.recorded import HARMLESS, difference, relevant, restore, upgrade
from ssl_jax.config.rules import CHOICES, RULES, require_memory, validate

__all__ = [
  'CHOICES',
  'HARMLESS',
  'NAMED',
  'RULES',
  'changed',
  'difference',
  'flatten',
  'load',
  'overridden',
  'override',
  'relevant',
  'require_memory',
  'restore',
  'set_name',
  'split_options',
  'upgrade',
  'validate',
]
