"""Configs of earlier runs, as recorded in config.json: updates them to current keys, and compares them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ssl_jax.config.loading import flatten, overridden
from ssl_jax.registry import plain, show

# Keys that may change when a run is resumed, because they do not change what it computes.
HARMLESS = (
  *('deterministic', 'data.path', 'data.workers', 'data.broken', 'data.cache'),
  *('model.remat', 'method.block', 'method.ring'),
  *('parallel', 'checkpoint', 'log', 'eval'),
)

# Keys that were added later, with the values that older runs used.
LATER = {
  'init': '',
  'fork': '',
  'deterministic': False,
  'data.held_out': 0.0,
  'data.stored_size': 0,
  'data.cache': '',
  'data.tokens': 32,
  'data.vocabulary': '',
  'data.columns': '',
  'data.shuffle_window': 0,
  'optimizer.clip': 0.0,
  'eval.cap_k': False,
  'eval.flip': False,
  'eval.patches': 0,
  'eval.patch': 0.75,
  'eval.whiten': False,
  'eval.prompts': '',
  'eval.class_names': '',
  'eval.retrieval': 5000,
  'optimizer.fixed_predictor': False,
  'eval.linear_during': False,
}
RENAMED = {'probe': 'online_probe'}  # {old: new} names of top-level keys
PRESETS = ('augment.name', 'projector.name', 'eval.linear')  # keys whose values supervised_* are now balanced_*

# Keys that change neither what a run computes nor how it is evaluated.
IRRELEVANT = (
  *(key for key in HARMLESS if key != 'eval'),
  *(f'eval.{key}' for key in ('every_epochs', 'measures', 'at_start', 'at_end', 'batch_size', 'data.path')),
  *('eval.sts', 'eval.transfer', 'eval.linear_during'),
)


def upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
  """Updates a recorded config: renames old keys and values, and adds the keys of `LATER`."""

  def named(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
      return {inner: named(f'{key}.{inner}', x) for inner, x in value.items()}
    if isinstance(value, str) and key.endswith(PRESETS):  # presets of Lee 2025, now named after the loss
      return re.sub('^supervised_', 'balanced_', value)
    return value

  config = {RENAMED.get(key, key): named(key, value) for key, value in plain(saved).items()}
  for key, value in LATER.items():
    section, _, last = key.rpartition('.')
    if isinstance(part := config.get(section) if section else config, dict):
      part.setdefault(last, value)
  return config


def restore(saved: Mapping[str, Any], base: ConfigDict, overrides: Sequence[str] = ()) -> ConfigDict:
  """The config of a recorded run, with `overrides`. Keys missing from a harmless section are taken from `base`."""
  try:
    config = ConfigDict(_with_tuples(upgrade(saved)))
  except ValueError as error:  # a key with a dot
    raise ValueError(f'config.json cannot be read ({error}): fix it, or remove it') from error
  for section in (key for key in HARMLESS if all(isinstance(c.get(key), ConfigDict) for c in (base, config))):
    config[section] = ConfigDict({**base[section].to_dict(), **config[section].to_dict()})
  return overridden(config, overrides)


def _with_tuples(value: Any) -> Any:
  """The value with tuples in place of lists, because JSON has no tuples."""
  if isinstance(value, Mapping):
    return {key: _with_tuples(inner) for key, inner in value.items()}
  return tuple(value) if isinstance(value, list) else value


def relevant(config: Mapping, prefix: str = '') -> dict:
  """Like `flatten`, without the `IRRELEVANT` keys."""
  return {key: value for key, value in flatten(config, prefix).items() if not _within(key, IRRELEVANT)}


def _within(key: str, sections: Sequence[str]) -> bool:
  """Whether a dotted key is one of these keys or sections, or inside one."""
  return any(key == section or key.startswith(section + '.') for section in sections)


def difference(old: Mapping[str, Any], new: Mapping[str, Any], among: Sequence[str] = ()) -> str | None:
  """One line with up to three keys that differ between two runs and are not harmless; None if there are none.

  With `among`, only these keys and sections are compared.
  """
  before, after = flatten(upgrade(old)), flatten(upgrade(new))
  value = lambda config, key: show(config[key]) if key in config else 'not set'
  found = [
    f'{key} = {value(after, key)} here, {value(before, key)} there'
    for key in sorted(before.keys() | after.keys())
    if not _within(key, HARMLESS) and (not among or _within(key, among)) and before.get(key) != after.get(key)
  ]
  return '; '.join([*found[:3], *(['...'] if len(found) > 3 else [])]) or None
