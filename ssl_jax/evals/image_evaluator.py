"""Evaluation of image encoders: kNN during training; kNN, classifiers, fine-tuning and measures at the end."""

import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ssl_jax.config import flatten, relevant
from ssl_jax.data import resolve, sources
from ssl_jax.data.resolve import stored_size
from ssl_jax.data.views import augment_settings, image_views
from ssl_jax.evals import check, features, finetune, from_features, knn, linear, metrics, scoring
from ssl_jax.losses import Loss
from ssl_jax.run import online_probe
from ssl_jax.run.builder import Run
from ssl_jax.run.state import State
from ssl_jax.workdir import metric_log, progress

# The config sections that affect features, in addition to the weights and the images.
FEATURE_SECTIONS = ('dtype', 'data', 'augment', 'augment_other', 'model', 'projector', 'method')

BANK_IMAGES = 50_000  # largest number of training images in the bank of `repelling_gap` (Lee 2025, A.4.5)


class ImageEvaluator:
  """Evaluates a run with the labeled images `run.eval_train` and `run.eval_test`."""

  def __init__(self, run: Run):
    self.run, self.sources = run, {'train': run.eval_train, 'test': run.eval_test}
    self._labels = labels = _checked_labels(run)
    self.k = chosen_k(run.config.eval, labels['train'], 'images')
    if run.config.eval.finetune:  # fail now, not after hours of training
      try:
        finetune.chosen_labels(labels['train'], finetune.parse(run.config.eval.finetune)[1], 0)
      except ValueError as error:
        raise ValueError(f'eval.finetune: {error}') from None
      finetune.require_weights(run.config.eval.class_weights, int(labels['train'].max()) + 1)
    given = run.method.features, run.views.eval_view, run.devices
    around = features.around_image(run.config.eval, augment_settings(run.config)[0]['size'])
    self._apply = functools.cache(lambda layers: features.extractor(*given, layers, around=around))
    self._plain = features.extractor(*given, ('backbone',)) if around else None

  def spaces(
    self, state: State, *, layers: tuple[str, ...] = features.LAYERS, views: bool = False
  ) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    """Features of all images and, if `views`, of augmented views of some. The state is on the devices."""
    return self._spaces(self._extract(*state.evaluated, layers=layers, views=views))

  def scores(self, state: State) -> dict[str, float]:
    """{'knn200': percent, ...}. The state is on the devices.

    Adds 'knn200_white' if `eval.whiten`, 'linear' if `eval.linear_during`, 'online_probe' if the run has one, and
    measures such as 'backbone/uniformity' if `eval.measures`.
    """
    choice, unreplicate = self.run.config.eval, self.run.devices.unreplicate
    needed = {choice.features} | ({'backbone'} if self.run.online_probe else set())  # not more: a projector may be wide
    layers = features.LAYERS if choice.measures else tuple(sorted(needed))
    spaces, labels = self.spaces(state, layers=layers, views=choice.measures)
    space = spaces[choice.features]
    self.latest = space.train, space.test, labels.test  # for `neighbors`
    data = (space.train, labels.train, space.test, labels.test)
    found = self._accuracy(*data)
    if choice.whiten and self.k:
      found |= knn.white_accuracy(*data, **self._votes)
    if choice.linear_during and choice.linear:
      found['linear'] = linear.evaluate(choice.linear, *data, seeds=choice.seeds[:1]).report['top1']
    if self.run.online_probe and not choice.data.name:  # the probe predicts only the classes of the training data
      weights = unreplicate(state.extra['probe']['weights'])
      probed = np.asarray(online_probe.scores(weights, self._plain_test(state, spaces)))
      check.finite('scores of the online probe', probed, f'lower online_probe = {self.run.config.online_probe:g}')
      predicted = probed.argmax(axis=1)
      found['online_probe'] = scoring.percent(predicted == labels.test)
    if choice.measures:
      loss = loss_settings(self.run, *unreplicate((state.step, state.params.get('temperature', {}))))
      measured = from_features.measures_of(spaces, labels, loss)
      found |= {f'{layer}/{name}': x for layer, numbers in measured.items() for name, x in numbers.items()}
    return found

  def _plain_test(self, state: State, spaces: Mapping[str, from_features.Space]) -> np.ndarray:
    """Backbone features of the test images alone: the online probe is not trained on means over flips and patches."""
    if self._plain is None:
      return spaces['backbone'].test
    sizes = dict(size=features.image_size(self.run.config), batch_size=self.run.config.eval.batch_size)
    found, _ = features.extract(self._plain, self.run.devices, *state.evaluated, self.sources['test'], **sizes)
    return found['backbone']

  def at_start(self, state: State) -> dict[str, float]:
    """`scores` of the untrained encoder, and kNN on raw pixels if images are in memory. The state is on the host."""
    untrained = self.scores(self.run.devices.replicate(state))
    if not all(source.ready(stored_size(self.run.config)) for source in self.sources.values()):
      return untrained
    pixels = []
    for split, source in self.sources.items():
      images, found = features.squares(source, np.arange(len(source)), self.run.config.data.image_size)
      pixels += [images.reshape(len(images), -1) / np.float32(255), self._labels[split][found]]
    return untrained | {f'{name}_pixels': value for name, value in self._accuracy(*pixels).items()}

  def evaluate(self, state: State, workdir: pathlib.Path) -> dict:
    """Runs every evaluation enabled in the config. The state is on the host.

    Writes evaluation.json and evaluation.npz (figure data). For another dataset (`eval.data.name`), the file names
    begin with evaluation_NAME, so that the evaluation on the run's dataset is kept.
    """
    results, arrays = self.results(state, workdir)
    metric_log.write_evaluation(workdir, results, arrays, name=self.run.config.eval.data.name)
    return results

  def results(self, state: State, workdir: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The numbers and arrays that `evaluate` writes."""
    run, choice = self.run, self.run.config.eval
    say = progress.stages('evaluation')
    say('features')
    spaces, labels = self.all_features(state, workdir / 'features')
    say(', '.join(filter(None, ['kNN' * bool(self.k), choice.linear and f'linear ({choice.linear})', 'measures'])))
    loss = loss_settings(run, state.step, state.params.get('temperature', {}))
    numbers, arrays = from_features.evaluate_features(spaces, labels, {**choice, 'k': self.k}, loss=loss)
    self.latest = spaces[choice.features].train, spaces[choice.features].test, labels.test
    arrays |= self.neighbors()
    if choice.finetune:
      say(f'training on labels ({choice.finetune})')
      numbers |= finetune.evaluate(run, state)
    compared = [run.eval_test, *([run.eval_train] if choice.data.name else [])]
    results = {**outline(run, int(state.step), *compared), **numbers}
    if run.config.data.broken == 'skip':
      results['broken_images_skipped'] = {split: len(source.skipped) for split, source in self.sources.items()}
    return results, arrays

  def neighbors(self, rows: int = 10, per_row: int = 10) -> dict[str, np.ndarray]:
    """One test image from each of the first classes, then its nearest training images, by the latest features.

    -> {'neighbors': uint8 [rows, 1 + per_row, H, W, 3], 'neighbors_labels': [rows, 1 + per_row]}
    """
    bank, queries, labels = self.latest
    chosen = np.array([np.flatnonzero(labels == c)[0] for c in np.unique(labels)[:rows]])
    nearest, _ = knn.neighbors(bank, queries[chosen], min(per_row, len(bank)))
    size, train, test = self.run.config.data.image_size, self.sources['train'], self.sources['test']
    train_positions, test_positions = train.readable(), test.readable()  # of the images that have features
    images, classes = [], []
    for query, found in zip(chosen, nearest, strict=True):
      own, _ = features.squares(test, test_positions[query, None], size)
      others, positions = features.squares(train, train_positions[found], size)
      images.append(np.concatenate([own, others]))
      classes.append([labels[query], *self._labels['train'][positions]])
    return {'neighbors': np.stack(images), 'neighbors_labels': np.array(classes)}

  def all_features(
    self, state: State, folder: pathlib.Path
  ) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    """`spaces` of all layers, with views, cached in `folder`. The state is on the host."""
    config, weights = self.run.config, state.evaluated
    settings = {k: v for k, v in flatten(config).items() if k.split('.')[0] in FEATURE_SECTIONS and k != 'data.path'}
    settings |= {
      'eval_data': {k: v for k, v in self.run.eval_data.items() if k != 'path'},
      'crop': config.eval.crop,
      'around': (config.eval.flip, config.eval.patches, config.eval.patch),
      'views': config.eval.views,
      'view_images': config.eval.view_images,
      'parts': ('train', 'test', 'views', 'partners', 'bank', 'skipped'),
      'seed': config.seed,
    }
    name = features.digest(settings, weights, *self.sources.values())
    arrays = features.cached(folder, name, lambda: self._extract(*self.run.devices.replicate(weights), views=True))
    for split, source in self.sources.items():  # stored, because images with cached features are not read again
      source.skipped.update(arrays[f'{split}_skipped'].tolist())
    return self._spaces(arrays)

  def _extract(self, params, stats, *, layers=features.LAYERS, views: bool) -> dict[str, np.ndarray]:
    """{'train_backbone': [n, d], ..., 'train_labels': [n], ...} of training images, test images and optional views."""
    config = self.run.config
    arrays: dict[str, np.ndarray] = {}

    def extract(name, apply, source, size, batch_size):
      sizes = dict(size=size, batch_size=batch_size)
      found, labels = features.extract(apply, self.run.devices, params, stats, source, **sizes)
      arrays.update({f'{name}_{layer}': x for layer, x in found.items()})
      return labels

    for name, source in self.sources.items():
      size, batch_size = features.image_size(config), config.eval.batch_size
      arrays[f'{name}_labels'] = extract(name, self._apply(layers), source, size, batch_size)
      arrays[f'{name}_skipped'] = np.array(sorted(source.skipped), np.int64)
    if views:  # after both splits, whose unreadable images are then known
      size, few = stored_size(config), config.eval.batch_size // config.eval.views
      arrays['views_labels'] = extract('views', self._view, self._view_source, size, few)
      # Random keys depend on the position: an image and its partner get the same augmentations.
      labels = self._view_source.labels
      assert labels is not None
      partners = metrics.same_label_partners(labels, np.random.default_rng(config.seed))
      extract('partners', self._view, self._view_source.subset(partners), size, few)
      arrays['bank_labels'] = extract('bank', self._one_view, self._bank_source, size, config.eval.batch_size)
    return arrays

  @functools.cached_property
  def _view(self) -> Callable:
    return self._views(range(self.run.config.eval.views))

  @functools.cached_property
  def _one_view(self) -> Callable:
    return self._views([1])  # the second view; the first views are the queries of `repelling_gap`

  def _views(self, chosen: Iterable[int]) -> Callable:
    config = self.run.config
    augments = image_views(config, on_device=True).training
    augments = [augments[v % config.views] for v in chosen]
    return features.view_extractor(self.run.method, augments, self.run.devices, seed=config.seed)

  @functools.cached_property
  def _view_source(self) -> sources.Source:
    """The test images of which augmented views are evaluated."""
    return self._some(self.run.eval_test, self.run.config.eval.view_images)

  @functools.cached_property
  def _bank_source(self) -> sources.Source:
    """The training images of the bank."""
    return self._some(self.run.eval_train, BANK_IMAGES)

  def _some(self, source: sources.Source, count: int) -> sources.Source:
    """At most `count` readable images of a source, drawn at random."""
    readable = source.readable()
    chosen = np.random.default_rng(self.run.config.seed).permutation(len(readable))[:count]
    return source.subset(readable[np.sort(chosen)])

  def _spaces(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    with_views = 'views_labels' in arrays

    def views(layer):
      own, partners = (np.moveaxis(arrays[f'{name}_{layer}'], 1, 0) for name in ('views', 'partners'))
      return own, partners, arrays[f'bank_{layer}'][:, 0]

    spaces = {
      layer: from_features.Space(
        arrays[f'train_{layer}'], arrays[f'test_{layer}'], *(views(layer) if with_views else ())
      )
      for layer in features.LAYERS
      if f'train_{layer}' in arrays
    }
    found = {name: arrays.get(f'{name}_labels') for name in ('views', 'bank')}
    names = self.run.eval_train.class_names
    return spaces, from_features.Labels(arrays['train_labels'], arrays['test_labels'], names=names, **found)

  @property
  def _votes(self) -> dict[str, Any]:
    choice = self.run.config.eval
    return dict(k=self.k, vote=choice.vote, temperature=choice.temperature)

  def _accuracy(self, bank, bank_labels, queries, labels) -> dict[str, float]:
    return knn.accuracy(bank, bank_labels, queries, labels, topk=(1,), **self._votes) if self.k else {}


def outline(run: Run, step: int, *compared: sources.Source) -> dict[str, Any]:
  """The first entries of evaluation.json: the checkpoint, the data and the settings.

  The checksums of the images `compared` tell `--mode=compare` whether two runs were evaluated on the same ones.
  """
  return {
    'step': step,
    'epoch': run.epoch(step),
    'data': {'name': run.eval_data['name'], **resolve.split_names(run.eval_data), **sources.checksums(*compared)},
    'settings': relevant(run.config.eval, 'eval.'),
  }


def _checked_labels(run: Run) -> dict[str, np.ndarray]:
  """The labels of the training and the test images. Raises a ValueError if the images cannot be evaluated.

  That is so if labels are missing, if the classes of the splits do not fit, or if the splits share images.
  """
  labels: dict[str, np.ndarray] = {}
  splits = resolve.split_names(run.eval_data)
  section = 'eval.data' if any(run.config.eval.data.values()) else 'data'
  names = {split: f'{section}.{split}_split = {splits[f"{split}_split"]!r}' for split in ('train', 'test')}
  for split, source in (('train', run.eval_train), ('test', run.eval_test)):
    if source.labels is None:
      folders = 'sort them into class folders, ' if run.eval_data['source'] in ('folder', 'imagenet') else ''
      everything = ' and --config.data.held_out=0' if run.config.data.held_out else ''
      raise ValueError(
        f'{names[split]} of {section}.name = {run.eval_data["name"]!r} has no labels, and evaluations need them: '
        f'{folders}give labeled images with --config.eval.data.name and .path, or .{split}_split, or train without '
        f"evaluations with '--config.eval.k=()'{everything}"
      )
    if len(set(source.labels.tolist())) == 1:
      raise ValueError(
        f'{names[split]} has only the class {source.class_name(int(source.labels[0]))!r}: add images of another, or '
        "train without evaluations with '--config.eval.k=()'"
      )
    labels[split] = check.labels(names[split], source.labels, len(source))
  missing, imbalance = np.setdiff1d(labels['test'], labels['train']), run.config.imbalance.name
  if run.eval_train is run.train and len(missing) and imbalance != 'none':
    raise ValueError(
      f'imbalance.name = {imbalance!r} keeps no image of the classes {missing[:5].tolist()}: '
      'evaluate with all training images with --config.eval.train_images=all'
    )
  check.seen(names['test'], labels['test'], 'the training images', labels['train'], run.eval_test.class_name)
  one_folder = run.eval_data['source'] == 'folder' and len(set(splits.values())) == 1
  if one_folder and run.eval_data['held_out'] > 0:  # nothing else gives common images
    fix = 'remove links to other images of the folder'
  elif section == 'data':
    fix = 'give splits without common images, or the same split twice and data.held_out=0.1'
  else:
    fix = 'give splits without common images, such as a folder with train and val'
  _require_apart(run.eval_train, run.eval_test, names, fix)
  return labels


def _require_apart(train: sources.Source, test: sources.Source, names: Mapping[str, str], fix: str) -> None:
  """Raises if test images are also training images: each would be its own nearest neighbor.

  Files and records are compared by identity, not by pixels. Arrays can only be compared by pixels. Since real datasets
  have a few duplicates, arrays are rejected only if duplicates make up more than half of the smaller split.
  """
  same = sources.same_images(train, test)
  train, test = train.origin or train, test.origin or test
  if len(same) > (min(len(train), len(test)) / 2 if isinstance(test, sources.Arrays) else 0):
    first = f'first: {test.where(same[0][1])} is {train.where(same[0][0])}'
    raise ValueError(
      f'{names["test"]}: {len(same):,} of its {len(test):,} images are also in {names["train"]} ({first}), each its '
      f'own nearest neighbor: {fix}'
    )


def chosen_k(choices: Mapping, labels: np.ndarray, what: str) -> tuple[int, ...]:
  """The numbers of neighbors, `eval.k`, limited to the size of the smallest class if `eval.cap_k`.

  Raises if a number exceeds the number of training examples.
  """
  k = tuple(choices['k'])
  if choices['cap_k']:
    smallest = int(np.unique(labels, return_counts=True)[1].min())
    k = tuple(dict.fromkeys(min(number, smallest) for number in k))
  if max(k, default=0) > len(labels):
    raise ValueError(f'eval.k = {k} must not exceed the {len(labels)} training {what}')
  return k


def loss_settings(run: Run, step: ArrayLike, params: Mapping[str, Any]) -> from_features.LossSettings:
  """Parameters of a run's loss for the measures: its temperature or alpha, its t_neg, and the batch size.

  `params` are the learned parameters of the temperature.
  """
  tau, loss = run.method.temperature.at(params, step), run.method.contrast
  tau = tau if tau is None or callable(tau) else float(tau)
  found: dict[str, Any] = {'temperature': tau, 'batch_size': run.config.batch_size}
  if isinstance(loss, Loss):
    alpha, t_neg = loss.parameter(loss.properties.inverse_temperature), loss.parameter('t_neg')
    alpha = 1 / tau if isinstance(tau, float) else alpha
    found |= {key: value for key, value in (('alpha', alpha), ('t_neg', t_neg)) if value is not None}
  return from_features.LossSettings(**found)
