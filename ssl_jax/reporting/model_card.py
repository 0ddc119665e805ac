"""The metadata of an exported model, for the Hugging Face Hub: config.json, and the header of README.md."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from ml_collections import ConfigDict

from ssl_jax.config import flatten
from ssl_jax.data.modality import modality_of
from ssl_jax.workdir import files, metric_log, progress

# {prefix of a result: (task, type of metric)}, in the vocabulary of the Hub.
KINDS = {
  'zero_shot': ('zero-shot-image-classification', 'accuracy'),
  'image_to_text': ('image-to-text-retrieval', 'recall'),
  'text_to_image': ('text-to-image-retrieval', 'recall'),
  'spearman': ('sentence-similarity', 'spearmanr'),
}
TAGS = ('jax', 'self-supervised-learning', 'contrastive-learning', 'feature-extraction')
# Results that depend on `eval.features`, `eval.flip` and `eval.patches`, while an export has the plain backbone.
OF_FEATURES = ('knn', 'linear', 'spearman', 'transfer')
# {key of `eval`: prefixes of the results that depend on it}
PROTOCOL: dict[str, tuple[str, ...]] = {
  'vote': ('knn',),
  'temperature': ('knn',),
  'linear': ('linear',),
  'crop': ('knn', 'linear', 'online_probe', 'zero_shot'),
}


class Card(NamedTuple):
  """Results and metadata of the newest checkpoint of a run."""

  results: dict[str, float]  # by their names in summary.json and evaluation.json
  protocol: dict[str, Any]  # how they were measured
  command: str  # the training command; '' if it was not recorded
  head: str  # the YAML header of README.md


def read(config: ConfigDict, workdir: pathlib.Path, step: int) -> Card:
  """The card of the checkpoint at `step` of the run with this config.

  Results of other steps, and of features other than the exported ones, are left out. If the evaluation used other
  settings than training did, the affected results of training are left out: the card describes a single protocol.
  """
  summary = _content(workdir / 'summary.json', metric_log.SUMMARY | {'command': str | None})
  evaluation = _content(workdir / f'{metric_log.evaluation_name(config.eval.data.name)}.json', {'step': int})
  results: dict[str, float] = {}
  settings = flatten(config.eval, 'eval.')
  for content, key in ((summary, 'steps'), (evaluation, 'step')):
    if content.get(key) == step:
      own = {**settings, **content.get('settings', {})}
      exported = own['eval.features'] == 'backbone' and not (own['eval.flip'] or own['eval.patches'])
      changed = {key for key in own if exported and own[key] != settings.get(key)}
      other_data = any(key.startswith('eval.data.') for key in changed)
      prefixes = tuple(name for key, names in PROTOCOL.items() if f'eval.{key}' in changed for name in names)
      results = {} if other_data else {name: x for name, x in results.items() if not name.startswith(prefixes)}
      settings = own if exported else settings
      found = progress.headline(content)
      results |= {name: x for name, x in found.items() if exported or not name.startswith(OF_FEATURES)}
  command = summary.get('command') if summary.get('steps') == step else None
  shown = [key for key, names in PROTOCOL.items() if any(name.startswith(names) for name in results)]
  protocol = {f'eval.{key}': settings[f'eval.{key}'] for key in shown}
  split = settings['eval.data.test_split'] or config.data.test_split
  return Card(results, protocol, command or '', _head(config, results, split))


def _content(file: pathlib.Path, types: Mapping[str, Any]) -> dict:
  """A JSON file with results; {} if there is none."""
  if not file.exists():
    return {}
  content = metric_log.rename(files.read_json(file))
  files.check_types(file, content, types)
  return content


def _head(config: ConfigDict, results: Mapping[str, float], split: str) -> str:
  """The YAML header of README.md: library, tags, data, and the results in the format of the Hub."""
  data = config.eval.data.name or config.data.name
  about = {'type': data, 'name': data, 'split': split}
  classification = 'text-classification' if modality_of(config).name == 'sentences' else 'image-classification'
  metrics: dict[str, list[dict[str, Any]]] = {}  # by task
  for name, value in results.items():
    task, kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), (classification, 'accuracy'))
    metrics.setdefault(task, []).append({'type': kind, 'name': name, 'value': value})
  head: dict[str, Any] = {
    'library_name': 'ssl_jax',
    'tags': [*TAGS, config.method.name, config.loss.name],
    'datasets': [config.data.name],
  }
  if results:
    # Each entry has a copy of `about`; otherwise, YAML would write references to the first one.
    listed: list[dict[str, Any]] = [
      {'task': {'type': task}, 'dataset': {**about}, 'metrics': found} for task, found in metrics.items()
    ]
    name = f'{config.model.name}, {config.method.name} on {config.data.name}'
    head['model-index'] = [{'name': name, 'results': listed}]
  return f'---\n{yaml.safe_dump(head, sort_keys=False)}# license: yours to choose\n---\n\n'


def config_json(config: ConfigDict, about: Mapping[str, str]) -> str:
  """The architecture, its inputs and outputs, and the config of the run under `run`."""
  name, arguments = config.model.name, {key: x for key, x in config.model.to_dict().items() if key != 'name'}
  facts = {key: x if key == 'ssl_jax' else json.loads(x) for key, x in about.items() if key != 'model'}
  content = {'architecture': name, 'model_args': arguments, **facts, 'run': config.to_dict()}
  return json.dumps(content, indent=2) + '\n'


def results_section(card: Card) -> str:
  """The table of results and the training command in Markdown; '' if there are neither."""
  text = ''
  if card.results:
    rows = ''.join(f'| `{name}` | {value:.2f} |\n' for name, value in card.results.items())
    how = ', '.join(f'`{key}={value}`' for key, value in card.protocol.items())
    text += '## Results\n\nAccuracies and recalls are in percent.'
    if how:
      text += f' Measured with {how}.'
    text += f'\n\n| result | value |\n|---|---|\n{rows}\n'
  if card.command:
    text += f'## Training\n\n```\n{card.command}\n```\n\n`config.json` has the whole config.\n\n'
  return text
