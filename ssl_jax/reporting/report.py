"""Writes report.html and report.md from the files of a workdir.

No metric is computed here: every number on the page comes from the files of the workdir. Numbers of evaluation.json are
in a `<data>` element, with their key and their full value.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import UnidentifiedImageError

from ssl_jax.config import flatten, relevant, upgrade
from ssl_jax.reporting import figures, page
from ssl_jax.reporting.page import Cards, Figure, Listing, Number, Part, Section, Table
from ssl_jax.workdir import fork, metric_log, progress
from ssl_jax.workdir.files import check_types, owner, read_bytes, read_json, reason, writable

MEASURES = {
  'alignment': ('alignment', 'E‖x − x⁺‖² of views, of paraphrases, or of images and their texts; lower is closer'),
  'modality_gap': ('modality gap', '‖E[x] − E[y]‖ of images x and texts y'),
  'uniformity': ('uniformity', 'log E exp(−2‖x − y‖²); lower is more uniform'),
  'train_uniformity': ('uniformity, training images', 'the same for images that the encoder has seen'),
  'tolerance': ('tolerance', 'mean s over all pairs, counted as 0 if the labels differ'),
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


UNIFORMITY_TOLERANCE = 'Negative uniformity and same-label similarity: up and to the right is better.'  # a caption
# What a report requires of the files of a workdir. They are checked, because they may be damaged.
SECTIONS = ('method', 'data', 'model', 'loss')
EVALUATION: dict[str, Any] = {'step': int, 'epoch': int | float, 'features': str, 'file': str}
EVALUATION |= dict.fromkeys(('data', 'settings', 'measures', 'classes'), dict)


CHECKSUMS = ('contents', 'sizes')  # keys of `sources.checksums`, which tell two datasets apart


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """The files of a workdir; the contents of missing files are empty."""

  workdir: pathlib.Path
  config: dict
  summary: dict
  evaluation: dict
  arrays: dict[str, np.ndarray]
  rows: list[dict]
  parent: dict = dataclasses.field(default_factory=dict)  # parent.json of a fork
  trained_on: dict = dataclasses.field(default_factory=dict)  # checksums of the training data, from the last checkpoint

  @classmethod
  def read(cls, workdir: str | pathlib.Path) -> 'FinishedRun':
    """Reads a workdir. The keys and metrics of older runs get their current names."""
    workdir = pathlib.Path(workdir).expanduser()
    load = lambda name, *known: _load(workdir / name, *known)
    config = load('config.json', dict.fromkeys(SECTIONS, dict) | {'seed': int}, (*SECTIONS, 'seed'))
    for section in SECTIONS if config else ():
      check_types(workdir / 'config.json', config[section], {'name': str}, ['name'])
    other = _other_data(config)
    check_types(workdir / 'config.json', {'eval.data.name': other}, {'eval.data.name': str})
    file = f'{metric_log.evaluation_name(other)}.json'
    evaluation = load(file, EVALUATION)
    for measures in evaluation.get('measures', {}).values():
      check_types(workdir / file, {'measures': measures}, {'measures': dict})
      check_types(workdir / file, measures, dict.fromkeys(measures, int | float))
    found = cls(
      workdir,
      config=upgrade(config) if config else {},
      summary=metric_log.rename(load('summary.json', metric_log.SUMMARY)),
      evaluation=evaluation,
      arrays=metric_log.read_arrays(workdir, other),
      rows=metric_log.read(workdir),
      parent=load(fork.PARENT, {'config': dict, 'parent': dict}, ('config', 'parent')),
      trained_on=_trained_on(workdir),
    )
    metric_log.check_history(workdir, found.rows, found.summary.get('steps', 0))
    if not (found.rows or found.summary or found.evaluation):
      raise ValueError(f'--workdir={str(workdir)!r} has nothing to report: train or evaluate there first')
    return found

  @property
  def accuracies(self) -> dict[str, float]:
    """Percentages from the evaluation or, if there is none, from training. The online probe is always from training."""
    latest = self.summary or {k: v for row in self.rows for k, v in row.items()}
    probe = {k: v for k, v in latest.items() if k == 'online_probe'}
    return progress.headline({**probe, **(self.evaluation or latest)})

  @property
  def settings(self) -> dict:
    """The settings behind the numbers: the config, and the settings of the evaluation, which may override it."""
    evaluated = upgrade({'eval': self.evaluation.get('settings', {})})['eval']  # its keys are flat: 'eval.k'
    found = relevant(self.config) | {key: value for key, value in evaluated.items() if key.startswith('eval.')}
    if found.get('data.source', 'tfds') not in ('tfds', 'imagenet', 'embedded'):  # their name identifies them
      found['data.file'] = pathlib.PurePath(self.config['data']['path']).name
      found |= {f'data.{key}': value for key, value in self.trained_on.items()}
    tested = self.evaluation.get('data', {})
    found |= {f'eval.data.{key}': tested[key] for key in CHECKSUMS if key in tested}
    return found | self._lineage(found)

  def _lineage(self, own: Mapping) -> dict:
    """The step of a fork, and the keys of its parents that differ from its own, such as 'parent.temperature.tau'."""
    found, prefix, config, above = {}, '', self.config, self.parent
    while config.get('fork'):
      found[f'{prefix}fork_step'] = fork.split(config['fork'])[1]
      if not above:  # a fork of an older version
        break
      prefix, config, above = f'parent.{prefix}', upgrade(above['config']), above['parent']
      theirs = {key: x for key, x in relevant(config).items() if not key.startswith(('data.', 'eval.', 'fork'))}
      found |= {prefix + key: x for key, x in theirs.items() if x != own.get(key)}
    return found

  @property
  def fork(self) -> tuple[str, int] | None:
    """The workdir and the step from which the run was forked."""
    return fork.split(self.config['fork']) if self.config.get('fork') else None

  @property
  def measured(self) -> list[int]:
    """The steps at which `accuracies` were measured during training; empty if they are from an evaluation."""
    steps = {} if self.evaluation else {name: row['step'] for row in self.rows for name in row}
    return sorted({steps[name] for name in self.accuracies if name in steps})

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


def _other_data(config: Mapping) -> str:
  """The dataset of the evaluation, if it is not that of the training; otherwise ''."""
  return flatten(config).get('eval.data.name', '')


def _trained_on(workdir: pathlib.Path) -> dict:
  """Checksums of the training data in the newest checkpoint; empty if there is none, or if it cannot be read."""
  try:
    data = (owner(workdir) or {}).get('data')
  except ValueError:
    return {}
  return {key: data[key] for key in CHECKSUMS if key in data} if isinstance(data, dict) else {}


def _load(file: pathlib.Path, types: Mapping, needed: Sequence[str] = ()) -> dict:
  """A JSON file of a workdir, checked; empty if there is none."""
  if not os.path.lexists(file):
    return {}
  content = read_json(file)
  check_types(file, content, types, needed)
  return content


def report(workdir: str | pathlib.Path) -> pathlib.Path:
  """Writes report.html, report.md and figures/ into the workdir. Returns the path of the page."""
  run = FinishedRun.read(workdir)
  if run.evaluation:
    file = run.workdir / f'{metric_log.evaluation_name(_other_data(run.config))}.json'
    check_types(file, run.evaluation, {}, ['features', 'epoch'] if 'step' in run.evaluation else ['features'])
    if not metric_log.belong_together(run.arrays, run.evaluation):
      raise ValueError(
        f'{file.with_suffix(".npz")} has the figures of another evaluation than {file.name}: evaluate again'
      )
  sections = [*_headline(run), *_training(run), *_similarities(run), *_representation(run), *_neighbors(run)]
  sections += [*_classes(run), *_settings(run)]
  return page.write(writable(workdir), 'report', run.title, _lead(run), sections)


# The sections of a report


def _lead(run: FinishedRun) -> str:
  words = []
  if run.config:
    words.append(f'{run.config["model"]["name"]}, loss {run.config["loss"]["name"]}, seed {run.config["seed"]}')
  if run.fork:
    words.append(f'forked from {run.fork[0]} at step {run.fork[1]:,}')
  if 'step' in run.evaluation:
    other = _other_data(run.config)
    on = f' on {other}' if other else ''
    words.append(f'evaluated{on} at step {run.evaluation["step"]:,} (epoch {run.evaluation["epoch"]:.4g}){run.since}')
  if run.evaluation:
    init = run.config.get('init') if run.evaluation.get('step') == 0 else ''
    weights = 'an untrained encoder' if init == 'random' else f'the weights of {init}'
    of = weights if init else 'this checkpoint' if run.config else run.title
    words.append(f'accuracies use the {run.evaluation["features"]} features of {of}')
  return '\n'.join('; '.join(line) + '.' for line in (words, _origin(run)) if line)


def _origin(run: FinishedRun) -> list[str]:
  """Where and when the run was trained, and with which code."""
  summary = run.summary
  if run.rows and not summary:
    return [f'Training is not finished: the last logged step is {run.rows[-1]["step"]:,}']
  words = []
  if 'seconds' in summary:
    words.append(f'Trained in {_duration(summary["seconds"])} on {summary.get("device", "an unknown device")}')
  if 'date' in summary:
    words.append(f'finished on {summary["date"]}')
  if summary.get('commit'):
    words.append(f'commit {summary["commit"]}')
  if 'jax' in summary:
    words.append(f'jax {summary["jax"]}')
  return words


def _duration(seconds: float) -> str:
  """Seconds in words.

  >>> [_duration(s) for s in (59.6, 125, 7300)]
  ['1 min 0 s', '2 min 5 s', '2 h 1 min']
  """
  minutes, rest = divmod(round(seconds), 60)
  if minutes >= 60:
    return f'{minutes // 60} h {minutes % 60} min'
  return f'{minutes} min {rest} s' if minutes else f'{rest} s'


def _headline(run: FinishedRun) -> list[Section]:
  names = {'linear': f'linear ({run.evaluation.get("linear_protocol")}), %', 'linear_top5': 'linear, top-5, %'}
  tuned = run.evaluation.get('finetune_protocol')
  names |= {'finetune': f'{tuned}, %', 'finetune_top5': f'{tuned}, top-5, %'}
  label = lambda key: (
    names.get(key)
    or with_unit(key.replace('knn', 'kNN, k = ').replace('_top5', ', top-5').replace('_white', ', whitened'))
  )
  spread = lambda key: run.evaluation.get(f'{key}_std')
  numbers = [(label(key), Number(key, value, spread=spread(key))) for key, value in run.accuracies.items()]
  spaces = run.evaluation.get('measures', {})
  for key in ('alignment', 'uniformity', 'rankme'):
    for space in spaces:
      if space == run.evaluation['features'] and key in spaces[space]:
        numbers.append((MEASURES[key][0], _number(space, key, spaces)))
  images = metric_log.examples(run.evaluation) or {}
  counted = 'sentences' if 'sentences' in run.evaluation else 'images'
  what = 'sentences' if run.config.get('data', {}).get('source') == 'text' else 'images'
  numbers += [
    (f'{name} {what}', Number(f'{counted}.{name}', images[name], ',d')) for name in ('train', 'test') if name in images
  ]
  return [Section('Headline', _about_headline(run), [Cards(numbers)] if numbers else [])]


def _about_headline(run: FinishedRun) -> str:
  """Where the numbers come from if not from an evaluation, and the accuracies of the untrained encoder, if known."""
  first = next((found for row in run.rows if row['step'] == 0 and (found := progress.accuracies(row))), {})
  words = []
  if run.measured:
    at = 'before' if run.measured == [0] else f'at step {" and ".join(f"{step:,}" for step in run.measured)} of'
    words.append(f'Measured {at} the training.')
  if first and run.measured != [0]:
    words.append(f'{progress.sentence("Before training", first)}.')
  if not run.evaluation:
    what = 'For all evaluations' if run.measured else 'Not evaluated yet'
    words.append(f'{what}: python main.py --mode=evaluate --workdir={run.workdir}')
  return ' '.join(words)


def with_unit(name: str) -> str:
  """The name of an accuracy or a correlation, with its unit.

  >>> with_unit('image_to_text_5'), with_unit('zero_shot_top5')
  ('image to text, R@5, %', 'zero-shot, top-5, %')
  """
  if name.startswith('spearman_'):
    return f'Spearman, {name.removeprefix("spearman_")}, × 100'
  if found := re.fullmatch(r'(image|text)_to_(image|text)_(\d+)', name):
    return f'{found[1]} to {found[2]}, R@{found[3]}, %'
  return f'{name.replace("zero_shot", "zero-shot").replace("_top", ", top-")}, %'


def _training(run: FinishedRun) -> list[Section]:
  if not any('loss' in row for row in run.rows):
    return []
  captions = {
    'loss': 'Loss, averaged over the steps between two logged rows.',
    'learning_rate': 'Learning rate.',
    'temperature': 'Temperature, averaged over the positives.',
    'positive_similarity': 'Mean similarity of the positives.',
    'accuracy': 'Accuracy on the test images during training.',
    'correlation': 'Correlation with human similarity scores during training, averaged over the sets.',
    'uniformity': 'Uniformity of the test images; lower is more uniform.',
    'entropy': 'Entropy of the negatives with the weights of CACR; at most the logarithm of their number.',
    'gaps': 'Gaps of the two bounds of the balanced objective (Lee 2025).',
  }
  drawn = figures.training(run.rows)
  text = f'Up to step {run.fork[1]:,} the curves are those of {run.fork[0]}.' if run.fork else ''
  return [Section('Training', text, [Figure(name, captions[name], chart) for name, chart in drawn.items()])]


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
    [name, *(_number(space, key, spaces) if key in spaces[space] else '–' for space in spaces), meaning]
    for key, (name, meaning) in MEASURES.items()
    if any(key in found for found in spaces.values())
  ]
  both = ('uniformity', 'same_label_similarity')
  points = {name: [found[key] for key in both] for name, found in spaces.items() if all(key in found for key in both)}
  parts: list[Part] = [Table(['', *spaces, 'meaning'], rows)]
  if points:
    parts.append(Figure('uniformity_tolerance', UNIFORMITY_TOLERANCE, figures.uniformity_tolerance(points)))
  if 'map' in run.arrays:
    names = run.evaluation['classes']['names']
    drawn = figures.plane(run.arrays['map'], run.arrays['map_labels'], run.arrays['map_shares'], names)
    parts.append(Figure('map', 'First two principal components of the test features, by class.', drawn))
  return [Section('Representation', '', parts)]


def _neighbors(run: FinishedRun) -> list[Section]:
  """The nearest neighbors of the evaluation or, if there is none, those at the end of training."""
  picture, text = run.workdir / 'neighbors.png', run.workdir / 'neighbors.txt'
  part: Part
  if 'neighbors' in run.arrays:
    caption = 'Test images, each with its nearest training images: blue if of the same class, otherwise orange.'
    drawn = figures.neighbors(run.arrays['neighbors'], run.arrays['neighbors_labels'])
    part = Figure('neighbors', caption, drawn)
  elif os.path.lexists(picture):
    caption = 'Test images, each with its nearest training images, at the end of training. '
    caption += 'A blue frame marks the same class, an orange one another class.'
    try:
      part = Figure('neighbors', caption, figures.sheet(read_bytes(picture)))
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises these for invalid files
      why = 'not an image' if isinstance(error, UnidentifiedImageError) else reason(error)
      raise ValueError(f'{picture} cannot be read ({why}): remove it') from error
  elif os.path.lexists(text):
    caption = 'Sentences or images, with their nearest sentences and cosine similarities, at the end of training.'
    try:
      part = Listing(caption, read_bytes(text).decode())
    except (OSError, ValueError) as error:
      raise ValueError(f'{text} cannot be read ({reason(error)}): remove it') from error
  else:
    return []
  return [Section('Nearest neighbors', '', [part])]


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
  counted = ['training images'] if 'train' in table else []
  rows = [
    [
      table['names'][c],
      *(Number(f'classes.{name}.{c}', table[name][c], '.1f') for name in columns),
      table[f'{kind}_mistaken_for'][c] or '–',
      *(Number(f'classes.train.{c}', table['train'][c], ',d') for _ in counted),
    ]
    for c in order[:10]
  ]
  parts: list[Part] = [Table(['class', *(f'{name}, %' for name in columns), 'mistaken for', *counted], rows)]
  drawn = figures.class_accuracy([table['names'][c] for c in order], [table[kind][c] for c in order], kind)
  parts.append(Figure('classes', f'Accuracy of the worst classes ({kind}).', drawn))
  parts += _confusions(run, kind)
  thirds = [key for key in run.evaluation if key.endswith(('_head', '_middle', '_tail'))]
  if thirds:
    rows = [[key.replace('_', ', '), Number(key, run.evaluation[key])] for key in thirds]
    parts.insert(1, Table(['third of the classes, by number of training images', '%'], rows))
  return [Section('Worst classes', '', parts)]


def _confusions(run: FinishedRun, kind: str) -> list[Part]:
  """The confusion matrix of a classifier or, with many classes, the most frequent confusions."""
  matrix, names = run.arrays.get(f'confusion_{kind}'), run.evaluation['classes']['names']
  if matrix is None:
    return []
  present = np.flatnonzero(matrix.sum(axis=0) + matrix.sum(axis=1))
  if len(present) <= figures.MOST_CELLS:
    drawn = figures.confusion(matrix[np.ix_(present, present)], [names[c] for c in present])
    caption = f'Rows: true classes. Columns: classes that {kind} predicts. Cells: % of the test images of the row.'
    return [Figure('confusion', caption, drawn)]
  wrong = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
  largest = np.argsort(-wrong, axis=None, kind='stable')[:10]
  pairs = [(at // len(matrix), at % len(matrix)) for at in largest]
  rows = [
    [names[true], names[predicted], f'{wrong[true, predicted]:,}', f'{matrix[true].sum():,}']
    for true, predicted in pairs
    if wrong[true, predicted]
  ]
  head = ['most frequent confusions: true class', f'predicted by {kind}', 'test images', 'of the class']
  return [Table(head, rows)] if rows else []


def _settings(run: FinishedRun) -> list[Section]:
  if not run.config:
    return []
  rows = [[key, json.dumps(value)] for key, value in flatten(run.config).items()]
  return [Section('Config', '', [Table(['key', 'value'], rows, folded=f'{len(rows)} keys')])]
