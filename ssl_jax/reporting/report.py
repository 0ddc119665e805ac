"""Writes report.html and report.md from the files of a workdir, and compare.html for several runs.

Nothing is computed here except means over seeds: every number on a page comes from evaluation.json, summary.json or
config.json, with its key and its full value in a `<data>` element.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ssl_jax.config import flatten, relevant, upgrade
from ssl_jax.evals.scoring import mean_and_spread
from ssl_jax.reporting import figures, page
from ssl_jax.reporting.page import Cards, Figure, Number, Part, Section, Table
from ssl_jax.workdir import metric_log, progress
from ssl_jax.workdir.files import read_json, writable

MEASURES = {
  'alignment': ('alignment', 'E‖x − x⁺‖² of views of an image, or of paraphrases; lower is closer'),
  'uniformity': ('uniformity', 'log E exp(−2‖x − y‖²); lower is more uniform'),
  'train_uniformity': ('uniformity, training images', 'the same for images that the encoder has seen'),
  'tolerance': ('tolerance', 'E[s · same label] over all pairs'),
  'same_label_similarity': ('same-label similarity', 'mean s over pairs with the same label'),
  'train_same_label_similarity': ('same-label similarity, training', 'the same for images that the encoder has seen'),
  'inter_class_uniformity': ('inter-class uniformity', 'uniformity of class centroids; lower is further apart'),
  'prototype_bias': ('prototype bias', 'E‖class mean − mean of an image’s views‖'),
  'prototype_bias_sampled': ('prototype bias, sampled', 'estimated from pairs of images of a class'),
  'attracting_gap': ('attracting bound gap', 'slack of the bound on the attracting term'),
  'repelling_gap': ('repelling bound gap', 'slack of the bound on the repelling term'),
  'conditional_entropy': ('conditional entropy', 'H(X⁻|X) in mini-batches of test images'),
  'penalty_entropy': ('penalty entropy', 'entropy of the weights that the loss gives to negatives'),
  'rankme': ('RankMe', 'effective rank; higher is less collapsed'),
  'lidar': ('LiDAR', 'effective rank of a discriminant analysis of images'),
  'alpha_req': ('α-ReQ', 'exponent of the power law of the spectrum; near 1 is good'),
}


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """The files of a workdir; the contents of missing files are empty."""

  workdir: pathlib.Path
  config: dict
  summary: dict
  evaluation: dict
  arrays: dict[str, np.ndarray]
  rows: list[dict]

  @classmethod
  def read(cls, workdir: str | pathlib.Path) -> 'FinishedRun':
    """Reads a workdir, with the keys and metrics of older runs under their present names."""
    workdir = pathlib.Path(workdir).expanduser()
    load = lambda name: read_json(workdir / name) if (workdir / name).exists() else {}
    config = load('config.json')
    arrays = {}
    if (workdir / 'evaluation.npz').exists():
      with np.load(workdir / 'evaluation.npz', allow_pickle=False) as stored:
        arrays = dict(stored)
    found = cls(
      workdir,
      config=upgrade(config) if config else {},
      summary=metric_log.rename(load('summary.json')),
      evaluation=load('evaluation.json'),
      arrays=arrays,
      rows=metric_log.read(workdir),
    )
    if not (found.rows or found.summary or found.evaluation):
      raise ValueError(f'--workdir={str(workdir)!r} has nothing to report: train or evaluate there first')
    return found

  @property
  def accuracies(self) -> dict[str, float]:
    """Percentages from the evaluation, or from the end of training if there is none; the online probe from training."""
    probe = {k: v for k, v in self.summary.items() if k == 'online_probe'}
    found = progress.accuracies({**probe, **(self.evaluation or self.summary)})
    others = ('_std', '_head', '_middle', '_tail')
    return {k: v for k, v in found.items() if isinstance(v, float) and not k.endswith(others)}

  @property
  def settings(self) -> dict:
    """What the numbers depend on: the config, with the settings of the evaluation, which may differ from the run's."""
    found = relevant(self.config) | upgrade({'eval': self.evaluation.get('settings', {})})['eval']
    if found.get('data.source') in ('arrays', 'folder', 'text'):  # a tfds set is identified by its name alone
      found['data.file'] = pathlib.PurePath(self.config['data']['path']).name
    return found

  @property
  def since(self) -> str:
    """A note if the run was trained further after the evaluation; otherwise ''."""
    last = max((row.get('step', 0) for row in self.rows), default=0)
    return f', then trained to step {last:,}' if last > self.evaluation.get('step', last) else ''

  @property
  def title(self) -> str:
    """The method and the dataset, or the file of the features."""
    if not self.config:
      return self.evaluation.get('file', self.workdir.name)
    return f'{self.config["method"]["name"]} on {self.config["data"]["name"]}'


def report(workdir: str | pathlib.Path) -> pathlib.Path:
  """Writes report.html, report.md and figures/ into the workdir. Returns the path of the page."""
  run = FinishedRun.read(workdir)
  sections = [*_headline(run), *_training(run), *_similarities(run), *_representation(run), *_classes(run)]
  sections += _settings(run)
  return page.write(writable(workdir), 'report', run.title, _lead(run), sections)


def compare(workdirs: Sequence[str | pathlib.Path], out: str | pathlib.Path) -> pathlib.Path:
  """Writes compare.html, compare.md and figures/ into `out`: mean ± standard deviation over seeds, per config."""
  if len(workdirs) < 2:
    raise ValueError(f'compare needs at least two workdirs, got {list(map(str, workdirs))}: add runs')
  groups = _groups([FinishedRun.read(workdir) for workdir in workdirs])
  count = sum(len(runs) for runs in groups.values())
  many = any(len(runs) > 1 for runs in groups.values())
  lead = f'{count} runs of {len(groups)} config{"s" * (len(groups) > 1)}.'
  lead += ' ± is one standard deviation over seeds.' if many else ''
  for run in (run for runs in groups.values() for run in runs if run.since):
    lead += f' {run.workdir} was evaluated at step {run.evaluation["step"]:,}{run.since}.'
  return page.write(writable(out), 'compare', 'Comparison of runs', lead, _comparison(groups))


# The sections of a report


def _lead(run: FinishedRun) -> str:
  words = []
  if run.config:
    words.append(f'{run.config["model"]["name"]}, loss {run.config["loss"]["name"]}, seed {run.config["seed"]}')
  if 'step' in run.evaluation:
    words.append(f'evaluated at step {run.evaluation["step"]:,} (epoch {run.evaluation["epoch"]:.4g}){run.since}')
  if run.evaluation:
    init = run.config.get('init') if run.evaluation.get('step') == 0 else ''
    weights = 'an untrained encoder' if init == 'random' else f'the weights of {init}'
    of = weights if init else 'this checkpoint' if run.config else run.title
    words.append(f'accuracies use the {run.evaluation["features"]} features of {of}')
  return '; '.join(words) + '.' if words else ''


def _headline(run: FinishedRun) -> list[Section]:
  names = {'linear': f'linear ({run.evaluation.get("linear_protocol")}), %', 'linear_top5': 'linear, top-5, %'}
  names['finetune'] = f'{run.evaluation.get("finetune_protocol")}, %'
  label = lambda key: names.get(key) or _with_unit(key.replace('knn', 'kNN, k = ').replace('_top5', ', top-5'))
  spread = lambda key: run.evaluation.get(f'{key}_std')
  numbers = [(label(key), Number(key, value, spread=spread(key))) for key, value in run.accuracies.items()]
  spaces = run.evaluation.get('measures', {})
  for key in ('alignment', 'uniformity', 'rankme'):
    for space in spaces:
      if space == run.evaluation['features'] and key in spaces[space]:
        numbers.append((MEASURES[key][0], _number(space, key, spaces)))
  images = run.evaluation.get('images', {})
  what = 'sentences' if run.config.get('data', {}).get('source') == 'text' else 'images'
  numbers += [
    (f'{name} {what}', Number(f'images.{name}', images[name], ',d')) for name in ('train', 'test') if name in images
  ]
  text = '' if run.evaluation else f'Not evaluated yet: main.py --mode=evaluate --workdir={run.workdir}'
  return [Section('Headline', text, [Cards(numbers)] if numbers else [])]


def _with_unit(name: str) -> str:
  """The name of an accuracy or a correlation, with its unit."""
  return f'Spearman, {name.removeprefix("spearman_")}, × 100' if name.startswith('spearman_') else f'{name}, %'


def _training(run: FinishedRun) -> list[Section]:
  if not any('loss' in row for row in run.rows):
    return []
  captions = {
    'loss': 'Loss, averaged over the steps between two logged rows.',
    'learning_rate': 'Learning rate.',
    'temperature': 'Mean temperature of the positives.',
    'positive_similarity': 'Mean similarity of the positives.',
    'accuracy': 'Accuracy on the test images during training.',
    'correlation': 'Correlation with human similarity scores during training, averaged over the sets.',
    'uniformity': 'Uniformity of the test images; lower is more uniform.',
    'entropy': 'Entropy of the negatives with the weights of CACR; at most the logarithm of their number.',
    'gaps': 'Gaps of the two bounds of the balanced objective (Lee 2025).',
  }
  drawn = figures.training(run.rows)
  return [Section('Training', '', [Figure(name, captions[name], figure, small=True) for name, figure in drawn.items()])]


def _similarities(run: FinishedRun) -> list[Section]:
  parts, arrays = [], run.arrays
  if 'similarities_TP' in arrays:
    caption = (
      'Similarities of two views of an image (true positives), of images of the same class (false negatives) and of '
      'different classes (true negatives), with the temperature of the loss.'
    )
    parts.append(Figure('similarities', caption, figures.similarities(arrays)))
  if 'penalty_edges' in arrays:
    caption = 'Distribution of the penalty: the lower the temperature, the more of it falls on the nearest negatives.'
    parts.append(Figure('penalties', caption, figures.penalties(arrays)))
  if 'separation_mean' in arrays:
    caption = 'Local separation: the positive is separated from the nearest negatives if the first bar is the highest.'
    parts.append(Figure('separation', caption, figures.separation(arrays['separation_mean'], arrays['separation_std'])))
  return [Section('What the loss sees', '', parts)] if parts else []


def _representation(run: FinishedRun) -> list[Section]:
  spaces = run.evaluation.get('measures', {})
  if not spaces:
    return []
  rows = [
    [name, *(_measure(space, key, spaces) for space in spaces), meaning]
    for key, (name, meaning) in MEASURES.items()
    if any(key in found for found in spaces.values())
  ]
  both = ('uniformity', 'same_label_similarity')
  points = {name: [found[key] for key in both] for name, found in spaces.items() if all(key in found for key in both)}
  parts: list[Part] = [Table(['', *spaces, 'meaning'], rows)]
  if points:
    caption = 'Uniformity against similarity within classes; up and to the right is better.'
    parts.append(Figure('uniformity_tolerance', caption, figures.uniformity_tolerance(points)))
  if 'map' in run.arrays:
    names = run.evaluation['classes']['names']
    drawn = figures.plane(run.arrays['map'], run.arrays['map_labels'], run.arrays['map_shares'], names)
    parts.append(Figure('map', 'First two principal components of the test features, by class.', drawn))
  if 'neighbours' in run.arrays:
    caption = 'Test images, each with its nearest training images: blue if of the same class, otherwise orange.'
    drawn = figures.neighbours(run.arrays['neighbours'], run.arrays['neighbours_labels'])
    parts.append(Figure('neighbours', caption, drawn))
  return [Section('Representation', '', parts)]


def _measure(space: str, key: str, spaces: Mapping) -> str | Number:
  return _number(space, key, spaces) if key in spaces[space] else '–'


def _number(space: str, key: str, spaces: Mapping) -> Number:
  return Number(f'measures.{space}.{key}', spaces[space][key], '.4f')


def _classes(run: FinishedRun) -> list[Section]:
  table = run.evaluation.get('classes', {})
  kinds = [name for name in table if f'{name}_mistaken_for' in table]
  if not kinds:
    return []
  kind, other = kinds[-1], kinds[0]
  order = sorted((c for c, value in enumerate(table[kind]) if value is not None), key=lambda c: table[kind][c])
  columns = list(dict.fromkeys((kind, other)))
  rows = [
    [
      table['names'][c],
      *(Number(f'classes.{name}.{c}', table[name][c], '.1f') for name in columns),
      table[f'{kind}_mistaken_for'][c] or '–',
      Number(f'classes.train.{c}', table['train'][c], ',d'),
    ]
    for c in order[:10]
  ]
  parts: list[Part] = [Table(['class', *(f'{name}, %' for name in columns), 'mistaken for', 'training images'], rows)]
  drawn = figures.class_accuracy([table['names'][c] for c in order], [table[kind][c] for c in order], kind)
  parts.append(Figure('classes', f'Accuracy of the worst classes ({kind}).', drawn))
  thirds = [key for key in run.evaluation if key.endswith(('_head', '_middle', '_tail'))]
  if thirds:
    rows = [[key.replace('_', ', '), Number(key, run.evaluation[key])] for key in thirds]
    parts.insert(1, Table(['third of the classes, by number of training images', '%'], rows))
  return [Section('Worst classes', '', parts)]


def _settings(run: FinishedRun) -> list[Section]:
  if not run.config:
    return []
  rows = [[key, json.dumps(value)] for key, value in flatten(run.config).items()]
  return [Section('Config', '', [Table(['key', 'value'], rows, folded=f'{len(rows)} keys')])]


# Several runs


def _groups(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
  """Runs by config, regardless of the seed. The name of a group is the keys in which it differs from the others."""
  settings = lambda run: run.settings if run.config else {}
  # An empty value means the same as a key that an older run does not have.
  configs = [{k: v for k, v in settings(run).items() if k != 'seed' and v != ''} for run in runs]
  keys = sorted(set().union(*configs))
  of_runs = [config for config in configs if config]  # features from a file have no config
  differing = [k for k in keys if len({json.dumps(config.get(k)) for config in of_runs}) > 1]
  groups = {}
  for run, config in zip(runs, configs, strict=True):
    if not run.config:  # features from a file: each is a group
      groups[str(run.workdir)] = [run]
      continue
    name = ', '.join(f'{k} = {config[k]}' for k in differing if k in config) or run.title
    for other in groups.setdefault(name, []):
      if other.config['seed'] == run.config['seed']:
        raise ValueError(f'{other.workdir} and {run.workdir} are the same run (seed {run.config["seed"]}): give one')
    groups[name].append(run)
  return groups


def _comparison(configs: Mapping[str, Sequence[FinishedRun]]) -> list[Section]:
  # The names of configs are too long for figures, which use letters.
  letters = [chr(ord('A') + i) if len(configs) <= 26 else str(i + 1) for i in range(len(configs))]
  groups = dict(zip(letters, configs.values(), strict=True))

  def spread(pick: Callable[[FinishedRun], Mapping[str, float]], form: str, prefix: str):
    """(the keys of any run, {group: {key: Number}} with the keys that all runs of the group have)"""
    keys = list(dict.fromkeys(key for runs in groups.values() for run in runs for key in pick(run)))
    cells = {}
    for name, runs in groups.items():
      shared = [key for key in keys if all(key in pick(run) for run in runs)]
      found = {key: mean_and_spread([pick(run)[key] for run in runs]) for key in shared}
      cells[name] = {key: Number(prefix + key, mean, form, std) for key, (mean, std) in found.items()}
    return keys, cells

  seeds = [', '.join(str(run.config.get('seed', '–')) for run in runs) for runs in groups.values()]
  keys, cells = spread(lambda run: run.accuracies, '.2f', '')
  rows = [
    [letter, seed, *(cells[letter].get(key, '–') for key in keys), config]
    for letter, config, seed in zip(letters, configs, seeds, strict=True)
  ]
  parts: list[Part] = [Table(['', 'seeds', *map(_with_unit, keys), 'config'], rows)]
  if keys:
    # The first one that most groups have; of correlations, the mean.
    most = max(keys, key=lambda key: (sum(key in cells[name] for name in letters), key == 'spearman_mean'))
    values = {name: (cells[name][most].value, cells[name][most].spread) for name in letters if most in cells[name]}
    parts.append(Figure('accuracy', f'{most}.', figures.dots(values, _with_unit(most))))
  logs = {
    f'{name}, seed {run.config.get("seed")}': run.rows for name, runs in groups.items() for run in runs if run.rows
  }
  if logs:
    parts.append(Figure('losses', 'Loss of every run.', figures.losses(logs)))
  sections = [Section('Accuracy', '', parts)]
  measures = lambda run: run.evaluation.get('measures', {})
  both = ('uniformity', 'same_label_similarity')
  for space in sorted(set().union(*(measures(run) for runs in groups.values() for run in runs))):
    pick = lambda run, space=space: measures(run).get(space, {})
    keys, cells = spread(pick, '.4f', f'measures.{space}.')
    rows = [[MEASURES[key][0], *(cells[name].get(key, '–') for name in letters)] for key in MEASURES if key in keys]
    parts = [Table(['', *letters], rows)]
    points = {name: [c[key].value for key in both] for name, c in cells.items() if all(key in c for key in both)}
    if points:
      drawn = figures.uniformity_tolerance(points)
      parts.append(Figure(f'uniformity_tolerance_{space}', 'Up and to the right is better.', drawn))
    sections.append(Section(f'Measures of the {space} features', '', parts))
  return sections
