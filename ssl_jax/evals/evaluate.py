"""Judges the encoder of a run: features once, then every evaluation that the config asks for."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ssl_jax import checkpoint, records
from ssl_jax.data import contact_sheet
from ssl_jax.evals import features, knn
from ssl_jax.run import Run, prepare
from ssl_jax.state import State
from ssl_jax.step import example_keys, make_views


class Evaluator:
  """kNN of a run's encoder, on the way and at the end."""

  def __init__(self, run: Run):
    for split, source in (('train', run.train), ('test', run.test)):
      if source.labels is None:
        raise ValueError(
          f'data.{split}_split = {run.config.data[f"{split}_split"]!r} of data.name = {run.config.data.name!r} has no '
          'labels, and kNN needs them: give labelled images, or train without kNN by --config.eval.k=()'
        )
    if max(run.config.eval.k) > len(run.train):
      raise ValueError(f'eval.k = {run.config.eval.k} has more than the {len(run.train)} training images: lower it')
    self.run = run
    self.apply = features.extractor(run.method, run.normalize, run.devices)

  def features(self, state: State):
    """((features, labels) of the training images, the same of the test images); the state is on the devices."""
    config, devices = self.run.config, self.run.devices
    sizes = dict(size=config.data.image_size, batch_size=config.eval.batch_size)
    parts = []
    for source in (self.run.train, self.run.test):
      found, labels = features.extract(self.apply, devices, state.params, state.batch_stats, source, **sizes)
      parts.append((found[config.eval.features], labels))
    return parts

  def knn(self, state: State) -> dict[str, float]:
    """{'knn200': percent, ...}"""
    (bank, bank_labels), (queries, labels) = self.features(state)
    return self._accuracy(bank, bank_labels, queries, labels)

  def at_start(self, state: State) -> dict[str, float]:
    """The untrained encoder's accuracy, and that of raw pixels: what learning has to beat."""
    size = self.run.config.data.image_size
    pixels = []
    for source in (self.run.train, self.run.test):
      images, found = features.squares(source, np.arange(len(source)), size)
      pixels += [images.reshape(len(images), -1) / np.float32(255), source.labels[found]]
    raw = {f'{name}_pixels': value for name, value in self._accuracy(*pixels).items()}
    return self.knn(self.run.devices.replicate(state)) | raw

  def draw_neighbours(self, state: State, path: pathlib.Path, per_row: int = 10) -> None:
    """A picture: a test image of each class, then its nearest training images."""
    (bank, _), (queries, labels) = self.features(state)
    chosen = np.array([np.flatnonzero(labels == c)[0] for c in np.unique(labels)[:10]])
    nearest, _ = knn.neighbours(bank, queries[chosen], min(per_row, len(bank)))
    size = self.run.config.data.image_size
    rows = [
      np.concatenate(
        [features.squares(self.run.test, query[None], size)[0], features.squares(self.run.train, found, size)[0]]
      )
      for query, found in zip(chosen, nearest, strict=True)
    ]
    if jax.process_index() == 0:
      contact_sheet.draw(rows, path)

  def _accuracy(self, bank, bank_labels, queries, labels):
    choice = self.run.config.eval
    votes = dict(k=choice.k, vote=choice.vote, temperature=choice.temperature)
    return knn.accuracy(bank, bank_labels, queries, labels, topk=(1,), **votes)


def evaluate(config: ConfigDict, workdir: str) -> dict[str, float]:
  """The accuracy of a workdir's newest checkpoint, written to evaluation.json."""
  if not config.eval.k:
    raise ValueError('eval.k = () asks for no evaluation: give numbers of neighbours, such as (200,)')
  checkpoint.read_config(workdir)
  run = prepare(config)
  evaluator = Evaluator(run)
  workdir = checkpoint.claim(workdir, config.to_dict())
  checkpoints = checkpoint.Checkpoints(workdir, config.to_dict(), config.checkpoint.keep)
  if checkpoints.latest() is None:
    raise ValueError(f'--workdir={str(workdir)!r} has no checkpoint yet: train first')
  state = checkpoints.restore(run.initial_state())
  checkpoints.close()
  results = {'step': int(state.step), **evaluator.knn(run.devices.replicate(state))}
  checkpoint.write_text(workdir / 'evaluation.json', json.dumps(results, indent=2) + '\n')
  print(records.sentence(f'step {results["step"]}', {k: v for k, v in results.items() if k != 'step'}))
  return results


def draw_views(config: ConfigDict, workdir: str, images: int = 8, draws: int = 4) -> pathlib.Path:
  """A contact sheet of views as the encoder sees them: an image a row, the image first, then pairs of views of it."""
  config.data.on_device = 'yes'  # the crops of the device and of the host follow one distribution
  run = prepare(config)
  folder = checkpoint.writable(workdir)
  originals, _ = features.squares(run.train, np.arange(images) * (len(run.train) // images), config.data.image_size)
  columns = [originals]
  for draw in range(draws):
    keys = example_keys(config.seed, jnp.int32(draw), jnp.arange(images))
    views = jax.jit(lambda keys: make_views(run.augments, keys, originals))(keys)
    columns += [np.asarray(run.denormalize(view)) for view in views]
  path = folder / 'views.png'
  contact_sheet.draw(np.stack(columns, axis=1), path)
  print(f'{images} images and {draws} draws of {config.views} views each: {path}')
  return path
