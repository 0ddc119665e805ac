"""Judges the encoder of a run: features once, then every evaluation that the config asks for."""

import functools
import pathlib
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ssl_jax.config import flatten, relevant
from ssl_jax.data import sources
from ssl_jax.evals import check, features, finetune, from_features, knn, linear, metrics, sts
from ssl_jax.reporting import contact_sheet
from ssl_jax.run import online_probe
from ssl_jax.run.builder import Run, augments_of, of_text, prepare, stored_size
from ssl_jax.run.state import State
from ssl_jax.run.update import example_keys, make_views
from ssl_jax.temperature import Temperature
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

# What an .npz file of features holds.
KEYS = ('train_features', 'train_labels', 'test_features', 'test_labels')

# The sections of a config that decide what features are, beside the weights and the images.
FEATURES = ('dtype', 'data', 'augment', 'augment_other', 'model', 'projector', 'method')


class Evaluator:
  """kNN of a run's encoder, on the way and at the end; at the end also the features for everything else."""

  def __init__(self, run: Run):
    for split, source in (('train', run.known), ('test', run.test)):
      if source.labels is None:
        raise ValueError(
          f'data.{split}_split = {run.judged[f"{split}_split"]!r} of data.name = {run.judged["name"]!r} has no labels, '
          f'and kNN needs them: name a labelled split by --config.eval.data.{split}_split, or train without kNN by '
          '--config.eval.k=()'
        )
    known = check.labels(f'data.train_split = {run.judged["train_split"]!r}', run.known.labels, len(run.known))
    asked = check.labels(f'data.test_split = {run.judged["test_split"]!r}', run.test.labels, len(run.test))
    if run.known is run.train and len(unseen := np.setdiff1d(asked, known)) and run.config.imbalance.name != 'none':
      raise ValueError(
        f'imbalance.name = {run.config.imbalance.name!r} keeps no image of the classes {unseen[:5].tolist()}: '
        'judge with all training images by --config.eval.train_images=all'
      )
    check.seen(f'data.test_split = {run.judged["test_split"]!r}', asked, 'the training images', known)
    _check_k(run.config.eval.k, len(run.known), 'images')
    if run.config.eval.finetune:  # before hours of training
      try:
        finetune.chosen_labels(known, _asked(run.config.eval.finetune)[1], 0)
      except ValueError as error:
        raise ValueError(f'eval.finetune: {error}') from None
    self.run = run
    self.sources = {'train': run.known, 'test': run.test}
    self._apply = functools.cache(lambda layers: features.extractor(run.method, run.normalize, run.devices, layers))

  def spaces(
    self, state: State, *, layers: tuple[str, ...] = features.LAYERS, views: bool = False
  ) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    """Features of all images and, where asked for, of views of some; the state is on devices."""
    return self._spaces(self._extract(*state.evaluated, layers=layers, views=views))

  def scores(self, state: State) -> dict[str, float]:
    """{'knn200': percent, ...}, 'probe' of a run that has one, and {'backbone/uniformity': ...} where it is asked for.

    The state is on devices.
    """
    choice, unreplicate = self.run.config.eval, self.run.devices.unreplicate
    needed = {choice.features} | ({'backbone'} if self.run.probe else set())  # a projector may be wide
    layers = features.LAYERS if choice.measures else tuple(sorted(needed))
    spaces, labels = self.spaces(state, layers=layers, views=choice.measures)
    judged = spaces[choice.features]
    self.latest = judged.train, judged.test, labels.test  # for the picture
    found = self._accuracy(judged.train, labels.train, judged.test, labels.test)
    if self.run.probe and not choice.data.name:  # it knows the classes it was trained on
      weights = unreplicate(state.extra['probe']['weights'])
      guessed = np.asarray(online_probe.scores(weights, spaces['backbone'].test)).argmax(axis=1)
      found['probe'] = 100 * float(np.mean(guessed == labels.test))
    if choice.measures:
      tau = self._tau(*unreplicate((state.step, state.params.get('temperature', {}))))
      measured = from_features.measures_of(spaces, labels, tau)
      found |= {f'{layer}/{name}': x for layer, numbers in measured.items() for name, x in numbers.items()}
    return found

  def at_start(self, state: State) -> dict[str, float]:
    """The untrained encoder's accuracy, and that of raw pixels where they fit in memory: what learning has to beat."""
    untrained = self.scores(self.run.devices.replicate(state))
    if not all(source.ready(stored_size(self.run.config)) for source in (self.run.known, self.run.test)):
      return untrained
    size = self.run.config.data.image_size
    pixels = []
    for source in (self.run.known, self.run.test):
      images, found = features.squares(source, np.arange(len(source)), size)
      pixels += [images.reshape(len(images), -1) / np.float32(255), source.labels[found]]
    raw = {f'{name}_pixels': value for name, value in self._accuracy(*pixels).items()}
    return untrained | raw

  def all_features(
    self, state: State, folder: pathlib.Path
  ) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    """The same with views, kept in `folder`; the state is a host's."""
    config, devices = self.run.config, self.run.devices
    settings = {k: v for k, v in flatten(config).items() if k.split('.')[0] in FEATURES and k != 'data.path'}
    settings |= {
      'judged': {k: v for k, v in self.run.judged.items() if k != 'path'},
      'crop': config.eval.crop,
      'views': config.eval.views,
      'viewed': config.eval.view_images,
      'parts': ('train', 'test', 'views', 'partners', 'skipped'),
      'seed': config.seed,
    }
    weights = state.evaluated
    name = features.digest(settings, weights, self.run.known, self.run.test)
    arrays = features.cached(folder, name, lambda: self._extract(*devices.replicate(weights), views=True))
    for part, source in self.sources.items():  # kept features are not read again
      source.skipped.update(arrays[f'{part}_skipped'].tolist())
    return self._spaces(arrays)

  def _extract(self, params, stats, *, layers=features.LAYERS, views: bool) -> dict[str, np.ndarray]:
    """{'train_backbone': [n, d], ..., 'train_labels': [n], ...} of training and test images and of views of some."""
    config, devices = self.run.config, self.run.devices
    size, whole = features.shown(config), config.eval.batch_size
    apply = self._apply(layers)
    arrays = {}

    def extract(name, apply, source, size, batch_size):
      found, labels = features.extract(apply, devices, params, stats, source, size=size, batch_size=batch_size)
      arrays.update({f'{name}_{layer}': x for layer, x in found.items()} | {f'{name}_labels': labels})
      arrays[f'{name}_skipped'] = np.array(sorted(source.skipped), np.int64)

    for name, source in self.sources.items():
      extract(name, apply, source, size, whole)
    if views:  # after the test images, so that those among them are known that cannot be read
      few = whole // config.eval.views
      extract('views', self._view, self._viewed, stored_size(config), few)
      # Keys follow from the place: the transformations of an image's views are those of its partner's.
      partners = metrics.same_label_partners(self._viewed.labels, np.random.default_rng(config.seed))
      extract('partners', self._view, self._viewed.subset(partners), stored_size(config), few)
    return arrays

  @functools.cached_property
  def _view(self):
    config = self.run.config
    augments, *_ = augments_of(config, on_device=True)
    augments = [augments[v % config.views] for v in range(config.eval.views)]
    return features.view_extractor(self.run.method, augments, self.run.devices, seed=config.seed)

  @functools.cached_property
  def _viewed(self) -> sources.Source:
    """The test images of which there are views."""
    config = self.run.config
    readable = self.run.test.readable()
    chosen = np.random.default_rng(config.seed).permutation(len(readable))[: config.eval.view_images]
    return self.run.test.subset(readable[np.sort(chosen)])

  def _spaces(self, arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, from_features.Space], from_features.Labels]:
    views = lambda layer: (np.moveaxis(arrays[f'{name}_{layer}'], 1, 0) for name in ('views', 'partners'))
    viewed = 'views_labels' in arrays
    spaces = {
      layer: from_features.Space(arrays[f'train_{layer}'], arrays[f'test_{layer}'], *(views(layer) if viewed else ()))
      for layer in features.LAYERS
      if f'train_{layer}' in arrays
    }
    labels = (arrays.get(f'{name}_labels') for name in ('train', 'test', 'views'))
    return spaces, from_features.Labels(*labels, self.run.known.class_names)

  def _tau(self, step, params) -> Temperature | None:
    """The temperature of the loss, a number or a function of the similarity."""
    tau = self.run.method.temperature.at(params, step)
    return tau if tau is None or callable(tau) else float(tau)

  def judge(self, state: State, workdir: pathlib.Path) -> dict:
    """Everything that the config asks of the state, a host's: evaluation.json, and what the figures need."""
    run, choice = self.run, self.run.config.eval
    say = _stages()
    say('features')
    spaces, labels = self.all_features(state, workdir / 'features')
    say(', '.join(filter(None, ['kNN' * bool(choice.k), choice.linear and f'linear ({choice.linear})', 'measures'])))
    tau = self._tau(state.step, state.params.get('temperature', {}))
    numbers, arrays = from_features.judge(spaces, labels, choice, temperature=tau)
    judged = spaces[choice.features]
    arrays |= self.neighbours(judged.train, judged.test, labels.test)
    if choice.finetune:
      say(f'training on labels ({choice.finetune})')
      numbers |= _finetune(run, state, spaces['backbone'].train)
    data = {key: run.judged[key] for key in ('name', 'train_split', 'test_split')}
    results = {
      'step': int(state.step),
      'epoch': int(state.step) / run.steps_per_epoch,
      'data': data,
      'settings': relevant(run.config.eval, 'eval.'),
      **numbers,
    }
    if run.config.data.broken == 'skip':
      results['broken_images_skipped'] = {part: len(source.skipped) for part, source in self.sources.items()}
    other = run.config.eval.data.name  # the run's own evaluation, and its report, stay
    metric_log.write_evaluation(workdir, results, arrays, f'step {results["step"]}{other and f", {other}"}', name=other)
    return results

  def neighbours(self, bank, queries, labels, rows: int = 10, per_row: int = 10) -> dict[str, np.ndarray]:
    """A test image of each of the first classes, then its nearest training images: [r, 1 + k, ...] and classes."""
    chosen = np.array([np.flatnonzero(labels == c)[0] for c in np.unique(labels)[:rows]])
    nearest, _ = knn.neighbours(bank, queries[chosen], min(per_row, len(bank)))
    size = self.run.config.data.image_size
    known, asked = (source.readable() for source in self.sources.values())  # those that have features
    images, classes = [], []
    for query, found in zip(chosen, nearest, strict=True):
      own, _ = features.squares(self.run.test, asked[query, None], size)
      others, places = features.squares(self.run.known, known[found], size)
      images.append(np.concatenate([own, others]))
      classes.append([labels[query], *self.run.known.labels[places]])
    return {'neighbours': np.stack(images), 'neighbours_labels': np.array(classes)}

  def draw_neighbours(self, path: pathlib.Path) -> None:
    """A picture of the last kNN: a test image of each class, then its nearest training images."""
    rows = self.neighbours(*self.latest)['neighbours']
    if jax.process_index() == 0:
      contact_sheet.draw(rows, path)

  def _accuracy(self, bank, bank_labels, queries, labels):
    choice = self.run.config.eval
    if not choice.k:
      return {}
    votes = dict(k=choice.k, vote=choice.vote, temperature=choice.temperature)
    return knn.accuracy(bank, bank_labels, queries, labels, topk=(1,), **votes)


def evaluator_of(run: Run) -> Evaluator | sts.Evaluator:
  """What judges a run, of images or of sentences."""
  return sts.Evaluator(run) if of_text(run.config) else Evaluator(run)


def evaluate(config: ConfigDict, workdir: str) -> dict:
  """Judges a workdir's newest checkpoint: evaluation.json has the numbers, evaluation.npz what the figures need.

  On another set (`eval.data.name`) these are evaluation_NAME.json and .npz, and the run's own stay.
  A workdir without one will do where `init` names a file, whose encoder is then judged as it is, or is 'random'.
  """
  if config.eval.file:
    return evaluate_features(config.eval.file, workdir, config.eval)
  if not config.init:
    files.read_config(workdir)
  run = prepare(config, resumed=files.saved(workdir), trains=False)
  evaluator = evaluator_of(run)
  workdir = files.check(workdir, config.to_dict())
  checkpoints = Checkpoints(workdir, run.identity)
  state = run.initial_state()
  if checkpoints.latest() is not None:
    state = checkpoints.restore(state)
  elif not config.init:
    raise ValueError(f'--workdir={str(workdir)!r} has no checkpoint yet: train first')
  else:  # it says what was judged
    files.claim(workdir, config.to_dict())
  checkpoints.close()
  return evaluator.judge(state, workdir)


def _check_k(k: Sequence[int], count: int, what: str) -> None:
  if max(k, default=0) > count:
    raise ValueError(f'eval.k = {k} has more than the {count} training {what}: lower it')


def _stages() -> Callable[[str], None]:
  """Says what an evaluation does next, since it may take minutes, and when."""
  start = time.monotonic()

  def say(stage):
    if jax.process_index() == 0:
      print(f'evaluation, {time.monotonic() - start:.0f} s: {stage}', flush=True)

  return say


def _asked(choice: str) -> tuple[bool, str]:
  """Of `eval.finetune`: whether the encoder is frozen, and which labels are used."""
  frozen, _, labels = choice.rpartition(' ')
  return (True, 'all') if choice == 'linear' else (frozen == 'linear', labels)


def _finetune(run: Run, state: State, extracted: np.ndarray) -> dict:
  """What config.eval.finetune asks for: {'finetune': percent, ...}"""
  choice = run.config.eval
  frozen, labels = _asked(choice.finetune)
  settings = dict(labels=labels, seeds=choice.seeds)
  if frozen:
    protocol = linear.PROTOCOLS.get(choice.linear, linear.PROTOCOLS['supervised_cifar'])
    settings |= dict(protocol=protocol, extracted=extracted)
  found = finetune.finetune(run, state, **settings)
  what = f'{"linear with augmentation" if frozen else "fine-tuned"}, labels: {labels}'
  numbers = {'finetune': found['top1'], 'finetune_std': found['top1_std']}
  return {**numbers, 'finetune_protocol': what, 'finetune_settings': linear.settings_of(found)}


def evaluate_features(path: str, workdir: str, settings: Mapping) -> dict:
  """Judges features of any encoder, an .npz file with `KEYS`: features [n, d] and labels [n] of both splits.

  The results go to a workdir that holds no run.
  """
  if (pathlib.Path(workdir).expanduser() / 'config.json').exists():
    raise ValueError(f'--workdir={str(workdir)!r} holds a run: give another directory for the results of eval.file')
  file = pathlib.Path(path).expanduser()
  if not file.is_file() or not zipfile.is_zipfile(file):
    raise ValueError(f'eval.file = {str(path)!r} is not an .npz file: give one with {", ".join(KEYS)}')
  with np.load(file, allow_pickle=False) as stored:
    for key in KEYS:
      if key not in stored:
        raise ValueError(f'eval.file = {str(path)!r} has no {key}: give {", ".join(KEYS)}')
    try:
      train, train_labels, test, test_labels = (stored[key] for key in KEYS)
    except sources.BROKEN_ARCHIVE as error:
      raise ValueError(f'eval.file = {str(path)!r} cannot be read ({error}): store plain numbers') from error
  known, asked = 'eval.file: train_features', 'eval.file: test_features'
  check.same_width(asked, check.features(asked, test), known, check.features(known, train))
  workdir = files.writable(workdir)
  _check_k(settings['k'], len(train), 'features')
  name = settings['features']
  labels = from_features.Labels(train_labels, test_labels)
  numbers, arrays = from_features.judge({name: from_features.Space(train, test)}, labels, settings)
  results = {'file': file.name, **numbers}
  metric_log.write_evaluation(workdir, results, arrays, file.name)
  return results


def draw_views(config: ConfigDict, workdir: str, images: int = 8, draws: int = 4) -> pathlib.Path:
  """A contact sheet of views as the encoder sees them: an image a row, the image first, then draws of all its views.

  Small crops are drawn as large as the others.
  """
  if of_text(config):
    raise ValueError("data.source = 'text' has no pictures: --mode=views is for images")
  run = prepare(config, trains=False)
  augments, *_ = augments_of(config, on_device=True)  # the crops of the device and of the host follow one distribution
  folder = files.writable(workdir)
  images = min(images, len(run.train))
  chosen = np.arange(images) * (len(run.train) // images)
  originals, _ = features.squares(run.train, chosen, config.data.image_size)
  stored, _ = features.squares(run.train, chosen, stored_size(config))
  columns = [originals]
  for draw in range(draws):
    keys = example_keys(config.seed, jnp.int32(draw), jnp.arange(images))
    views = jax.jit(lambda keys: make_views(augments, keys, stored))(keys)
    columns += [contact_sheet.enlarge(run.denormalize(view), config.data.image_size) for view in views]
  path = folder / 'views.png'
  contact_sheet.draw(np.stack(columns, axis=1), path)
  print(f'{images} images and {draws} draws of {len(augments)} views each: {path}')
  return path
