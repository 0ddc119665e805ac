"""Transfer of an encoder to other image datasets with a few labels per class: --mode=transfer, CACR's Table 6.

Each dataset is evaluated by fine-tuning and by linear probing, with the protocol of `few_shot`, its own metric, and
several draws of the shots. After each evaluation, the results are written to transfer.json and transfer.md in the
workdir. Results of the same weights that are already there are not recomputed.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ssl_jax import models
from ssl_jax.config import set_name
from ssl_jax.data import resolve, sources
from ssl_jax.data.modality import modality_of
from ssl_jax.evals import check, features, few_shot
from ssl_jax.evals.scoring import METRICS, mean_and_spread
from ssl_jax.models import torch_weights
from ssl_jax.registry import nearest
from ssl_jax.run.devices import Devices, jit_once
from ssl_jax.workdir import files, progress
from ssl_jax.workdir.checkpoints import Checkpoints

SEEDS = (0, 1, 2)  # draws of the shots, unless eval.seeds has several
KINDS = {'finetune': 'fine-tuned', 'linear': 'linear'}
OWN_SHARE = 0.2  # share of test images, for a folder without splits


class Known(NamedTuple):
  """A dataset of ELEVATER: its metric, and its name and splits in tfds; the name is '' if tfds does not have it."""

  metric: str
  tfds: str = ''
  train: str = 'train'
  test: str = 'test'


# The 20 datasets of Table 6, in its order. tfds has no test split of EuroSAT and RESISC45. The slices below have
# ELEVATER's sizes: 5,000 training and 5,000 test images for EuroSAT, 3,150 and 25,200 for RESISC45. A dataset without a
# tfds name must be given as a folder.
ELEVATER = {
  'caltech101': Known('mean_per_class', 'caltech101'),
  'cifar10': Known('accuracy', 'cifar10'),
  'cifar100': Known('accuracy', 'cifar100'),
  'country211': Known('accuracy'),
  'dtd': Known('accuracy', 'dtd'),
  'eurosat': Known('accuracy', 'eurosat/rgb', 'train[:5000]', 'train[5000:10000]'),
  'fer2013': Known('accuracy'),
  'fgvc_aircraft': Known('mean_per_class'),
  'food101': Known('accuracy', 'food101', test='validation'),
  'gtsrb': Known('accuracy'),
  'hateful_memes': Known('roc_auc'),
  'kitti_distance': Known('accuracy'),
  'mnist': Known('accuracy', 'mnist'),
  'oxford_flowers102': Known('mean_per_class', 'oxford_flowers102'),
  'oxford_iiit_pet': Known('mean_per_class', 'oxford_iiit_pet'),
  'patch_camelyon': Known('accuracy', 'patch_camelyon'),
  'rendered_sst2': Known('accuracy'),
  'resisc45': Known('accuracy', 'resisc45', 'train[:3150]', 'train[3150:28350]'),
  'stanford_cars': Known('accuracy', 'cars196'),
  'voc2007': Known('map', 'voc/2007'),
}


class Target(NamedTuple):
  """A dataset to transfer to."""

  name: str
  metric: str
  data: dict[str, Any]  # a config section `data`


def parse(text: str, config: ConfigDict) -> Target:
  """Parses a dataset: a NAME in `ELEVATER` or tfds, FOLDER, or NAME=FOLDER, optionally followed by :METRIC."""
  what, colon, metric = text.rpartition(':')
  path = os.path.expanduser(what.partition('=')[2] or what)
  if colon and metric not in METRICS and (what in ELEVATER or os.path.isdir(path)):
    raise ValueError(f'{text!r} names the metric {metric!r}, which does not exist: {nearest(metric, METRICS)}')
  what, metric = (what, metric) if colon and metric in METRICS else (text, '')
  name, _, folder = what.partition('=')
  of_tfds = {known.tfds for known in ELEVATER.values()}  # in other names, a slash is the sign of a folder
  if not folder and (('/' in name and name not in of_tfds) or name.startswith(('.', '~'))):
    name, folder = set_name(name), name
  if not name or name.startswith('-'):
    raise ValueError(f'{text!r} is not a set: give NAME, FOLDER or NAME=FOLDER, such as cifar10 or birds=/data/birds')
  known = ELEVATER.get(name, Known('accuracy', '' if folder else name))
  if not folder and not known.tfds:
    raise ValueError(f'{name!r} is not a set of tfds: give its folder, such as {name}=/data/{name}')
  own = dict(source='folder', path=folder, train_split='auto', test_split='auto', held_out=OWN_SHARE)
  path = config.data.path if config.data.source == 'tfds' else ''
  other = dict(source='tfds', path=path, train_split=known.train, test_split=known.test, held_out=0.0)
  place = {**own, 'name': name} if folder else {**other, 'name': known.tfds}
  return Target(name, metric or known.metric, {**config.data.to_dict(), 'classes': '', **place})


class Opened(NamedTuple):
  """The images of a dataset and their targets: classes [n], or bools [n, c] if images have several labels."""

  train: sources.Source
  test: sources.Source
  train_targets: np.ndarray
  test_targets: np.ndarray

  @property
  def multi_label(self) -> bool:
    return self.train_targets.ndim == 2

  @property
  def classes(self) -> int:
    if self.multi_label:
      return self.train_targets.shape[1]
    return int(max(self.train_targets.max(), self.test_targets.max())) + 1


def open_set(target: Target) -> Opened:
  """Opens a dataset without decoding images. Raises a one-line ValueError if its labels do not fit its metric."""
  try:
    found = {split: sources.load(resolve.locate(target.data), split) for split in ('train', 'test')}
    targets = _targets(found)
  except ValueError as error:
    raise ValueError(f'transfer to {target.name!r}: {error}') from error
  opened = Opened(found['train'], found['test'], targets['train'], targets['test'])
  if opened.multi_label != (target.metric == 'map'):
    fix = 'append :map' if opened.multi_label else 'append :accuracy'
    labels = 'several labels per image' if opened.multi_label else 'one label per image'
    raise ValueError(f'transfer to {target.name!r}: metric {target.metric!r} does not apply to {labels}: {fix}')
  if target.metric == 'roc_auc' and opened.classes != 2:
    raise ValueError(f'transfer to {target.name!r}: roc_auc is for two classes, and it has {opened.classes}')
  return opened


def _targets(found: Mapping[str, sources.Source]) -> dict[str, np.ndarray]:
  if all(source.labels is not None for source in found.values()):
    return {split: check.labels(f'labels of {split}', source.labels, len(source)) for split, source in found.items()}
  listed = {split: source.multi_labels() for split, source in found.items()}
  if any(labels is None for labels in listed.values()):
    raise ValueError('its images have no labels: give class folders, or labels.csv beside the images of each split')
  names = sorted({name for labels in listed.values() for own in labels or () for name in own})
  number = {name: k for k, name in enumerate(names)}
  targets = {split: np.zeros((len(found[split]), len(names)), bool) for split in found}
  for split, labels in listed.items():
    for row, own in zip(targets[split], labels or (), strict=True):
      row[[number[name] for name in own]] = True
  return targets


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
  """An encoder with its weights, on all devices."""

  config: ConfigDict
  module: models.Encoder
  variables: Any
  step: int  # of the run; 0 for weights from a file
  devices: Devices

  @functools.cached_property
  def eval_view(self) -> Callable[[jax.Array], jax.Array]:
    return modality_of(self.config).views(self.config, on_device=True).eval_view

  def logits(self, model: few_shot.Model, variables: Any, source: sources.Source) -> np.ndarray:
    """The logits of an image classifier for all readable images of a source."""
    apply = lambda params, stats, images: model.apply(_both(params, stats), images, False)[0]
    named: dict[str, Any] = dict(what='logits of the few-shot classifier', fix='its training diverged')
    return self._extract(apply, variables, source, **named)

  def features(self, source: sources.Source) -> np.ndarray:
    """Features [n, d] of all readable images of a source."""
    view = jax.vmap(self.eval_view)
    apply = lambda params, stats, images: self.module.apply(_both(params, stats), view(images), False)
    return self._extract(apply, self.variables, source)

  def images(self, source: sources.Source) -> np.ndarray:
    """All readable images of a source, uint8 [n, size, size, 3]."""
    wanted = np.arange(len(source))
    images, found = features.squares(source, wanted, features.image_size(self.config))
    return images[found == wanted]  # without the images that replace broken ones

  def _extract(self, apply: Callable, variables: Any, source: sources.Source, **named: Any) -> np.ndarray:
    mapped = self.devices.map(
      lambda params, stats, images, positions: {'found': apply(params, stats, images)},
      replicated=2,
      sharded=2,
      out='sharded',
    )
    weights = self.devices.replicate((variables['params'], variables.get('batch_stats', {})))
    sizes: dict[str, Any] = dict(size=features.image_size(self.config), batch_size=self.config.eval.batch_size)
    return features.extract(mapped, self.devices, weights[0], weights[1], source, **sizes, **named)[0]['found']


def _both(params: Any, stats: Any) -> dict[str, Any]:
  return {'params': params, 'batch_stats': stats}


def encoder_of(config: ConfigDict, workdir: pathlib.Path) -> Encoder:
  """The encoder of a workdir's newest checkpoint or, without one, of the weights that `init` names."""
  if modality_of(config).encoded != 'images':
    raise ValueError(f'model.name = {config.model.name!r} encodes sentences: --mode=transfer is for images')
  module = models.create(dtype=jnp.dtype(config.dtype), **config.model)
  devices = Devices.choose(config.parallel.map, config.parallel.devices)
  size = config.data.image_size
  if files.saved(workdir):
    checkpoints = Checkpoints(workdir)
    state = checkpoints.newest()
    checkpoints.close()
    params, stats = state.evaluated
    variables = {'params': params['network']['encoder'], 'batch_stats': stats.get('encoder', {})}
    return Encoder(config, module, variables, int(state.step), devices)
  if not config.init:
    raise ValueError(f'--workdir={str(workdir)!r} has no checkpoint yet: train first, or set init to a file of weights')
  if config.init == 'random':
    example = module.example(size)
    found = jax.device_get(jit_once(lambda: module.init(jax.random.key(config.seed), example, train=False))())
  else:
    found = torch_weights.load(config.init, module, size)
  return Encoder(config, module, {'batch_stats': {}, **found}, 0, devices)


def transfer(
  config: ConfigDict,
  workdir: str,
  arguments: Sequence[str] = (),
  protocol: few_shot.Protocol = few_shot.Protocol(),  # noqa: B008  # it is frozen
) -> dict:
  """Evaluates the encoder of a workdir on the datasets in `arguments` (see `parse`), or on those of ELEVATER in tfds.

  All datasets are opened before the first evaluation. Returns the content of transfer.json.
  """
  if config.parallel.processes > 1:
    raise ValueError(f'parallel.processes = {config.parallel.processes} must be 1 for --mode=transfer')
  if not arguments:
    arguments = [name for name, known in ELEVATER.items() if known.tfds]
    others = ', '.join(name for name in ELEVATER if name not in arguments)
    print(f'transfer: to {len(arguments)} sets of ELEVATER; these need folders: {others}', flush=True)
  targets = [parse(text, config) for text in arguments]
  names = [target.name for target in targets]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(f'{twice[0]!r} is given twice: name another set, or call it NAME=FOLDER')
  if not config.init:
    files.read_config(workdir)
  path = files.check(workdir, config.to_dict())
  encoder, opened = encoder_of(config, path), {target.name: open_set(target) for target in targets}
  seeds = tuple(int(seed) for seed in config.eval.seeds) if len(config.eval.seeds) > 1 else SEEDS
  file, stage = path / 'transfer.json', progress.stages('transfer')
  results = _stored(file, weights := _weights(encoder))
  for place, target in enumerate(targets, start=1):
    settings = _settings(encoder, target, opened[target.name], protocol, seeds)
    entry: dict[str, Any] = results['sets'].get(target.name, {})
    if entry.get('settings') != settings:
      entry = {'metric': target.metric, 'settings': settings}
    for kind, words in KINDS.items():
      what = f'{target.name} ({place} of {len(targets)}), {words}'
      if kind in entry:
        print(f'transfer: {what}: done before, {entry[kind]["mean"]:.2f}', flush=True)
      else:
        say = lambda text, what=what: stage(f'{what}: {text}')
        entry[kind] = _evaluate(encoder, opened[target.name], target.metric, kind, protocol, seeds, say)
        results = _stored(file, weights)  # another process may have added sets
        results['sets'][target.name] = entry
        results['mean'] = {k: _mean(results['sets'], k) for k in KINDS}
        files.write_text(file, json.dumps(results, indent=2, allow_nan=False) + '\n')
      files.write_text(path / 'transfer.md', markdown(results))  # also if it was lost after the last part
  print(f'{path / "transfer.md"} has the table of {len(results["sets"])} sets', flush=True)
  return results


def _stored(file: pathlib.Path, weights: str) -> dict[str, Any]:
  """The content of transfer.json, without datasets if it does not exist or is of other weights."""
  if file.exists():
    stored = files.read_json(file)
    files.check_types(file, stored, {'sets': dict}, ['sets'])
    files.check_types(file, stored['sets'], dict.fromkeys(stored['sets'], dict))
    if stored.get('weights') == weights:
      return stored
  return {'weights': weights, 'sets': {}}


def _weights(encoder: Encoder) -> str:
  """A hash of the encoder, its weights and the size and normalization of its inputs."""
  config = encoder.config.to_dict()
  known = {key: config[key] for key in ('model', 'dtype', 'augment')} | {'image_size': config['data']['image_size']}
  return features.digest(known, encoder.variables)


def _settings(
  encoder: Encoder, target: Target, opened: Opened, protocol: few_shot.Protocol, seeds: Sequence[int]
) -> dict[str, Any]:
  """Everything that a result depends on besides `_weights`, with JSON types."""
  data = {key: target.data[key] for key in ('source', 'name', 'train_split', 'test_split', 'held_out')}
  if target.data['source'] == 'folder':
    data['path'] = str(pathlib.Path(target.data['path']).expanduser().absolute())
  known = {'step': encoder.step, 'init': encoder.config.init if not encoder.step else '', 'seeds': list(seeds)}
  data['stored'] = [opened.train.fingerprint(), opened.test.fingerprint()]
  known |= {'metric': target.metric, 'crop': encoder.config.eval.crop, 'data': data}
  return json.loads(json.dumps({**known, 'protocol': dataclasses.asdict(protocol)}))


def _evaluate(
  encoder: Encoder,
  data: Opened,
  metric: str,
  kind: str,
  protocol: few_shot.Protocol,
  seeds: Sequence[int],
  say: Callable[[str], None],
) -> dict[str, Any]:
  """The metric and the chosen hyperparameters for each draw of the shots."""
  scores: list[float] = []
  chosen: list[few_shot.Chosen] = []
  for seed, found, logits in _fits(encoder, data, METRICS[metric], kind, protocol, seeds):
    check.finite('logits of the classifier', logits, 'evaluate an encoder that has not diverged')
    scores.append(METRICS[metric](logits, data.test_targets[data.test.readable()]))
    chosen.append(found)
    say(f'seed {seed}: {scores[-1]:.2f} (learning rate {found.learning_rate:g}, decay {found.weight_decay:.3g})')
  mean, spread = mean_and_spread(scores)
  columns = {field: [getattr(one, field) for one in chosen] for field in few_shot.Chosen._fields}
  return {'mean': mean, 'std': spread, 'seeds': scores, 'held_out': columns.pop('score'), **columns}


def _fits(
  encoder: Encoder, data: Opened, metric: Callable, kind: str, protocol: few_shot.Protocol, seeds: Sequence[int]
) -> Iterator[tuple[int, few_shot.Chosen, np.ndarray]]:
  """Yields (seed, chosen hyperparameters, logits of all readable test images)."""
  test = encoder.features(data.test) if kind == 'linear' else None
  width = features.width(encoder.module, encoder.variables, encoder.config.data.image_size)
  if kind == 'linear':
    model = few_shot.on_features(width, data.classes, data.multi_label)
  else:
    given = encoder.module, encoder.variables, encoder.eval_view
    model = few_shot.on_encoder(*given, width, data.classes, data.multi_label)
  for seed in seeds:
    rows = few_shot.draw(data.train_targets, protocol.shots, seed)
    source = data.train.subset(rows)
    inputs = encoder.features(source) if kind == 'linear' else encoder.images(source)
    targets = data.train_targets[rows][source.readable()]
    found = few_shot.choose(model, inputs, targets, metric, protocol, seed)
    settings: dict[str, Any] = dict(epochs=protocol.epochs, batch=protocol.batch, seed=seed)
    (fitted,) = few_shot.train(model, inputs, targets, [(found.learning_rate, found.weight_decay)], **settings)
    if test is None:
      logits = encoder.logits(model, jax.device_get(fitted), data.test)
    else:
      (logits,) = few_shot.predictions(model, [fitted], test, 4096)
    yield seed, found, logits


def _mean(sets: Mapping[str, Mapping], kind: str) -> float | None:
  """The mean over the datasets; None unless all have a result of this kind."""
  found = [entry[kind]['mean'] for entry in sets.values() if kind in entry]
  return float(np.mean(found)) if len(found) == len(sets) else None


def markdown(results: Mapping[str, Any]) -> str:
  """The table: one line per dataset, mean ± standard deviation over the draws of the shots."""
  lines = [f'| set | metric | {" | ".join(KINDS.values())} |', f'|---|---|{"---|" * len(KINDS)}']

  def cell(entry, kind):
    if kind not in entry:
      return '—'
    spread = entry[kind]['std']
    return f'{entry[kind]["mean"]:.1f}' + ('' if spread is None else f' ± {spread:.1f}')

  for name, entry in results['sets'].items():
    lines.append(f'| {name} | {entry["metric"]} | {" | ".join(cell(entry, kind) for kind in KINDS)} |')
  means = ['—' if (value := results['mean'][kind]) is None else f'{value:.1f}' for kind in KINDS]
  return '\n'.join([*lines, f'| mean | | {" | ".join(means)} |']) + '\n'
