"""Judges an encoder of sentences: how well the cosines of pairs of sentences rank as people rank their meaning."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from scipy.stats import rankdata

from ssl_jax.config import relevant
from ssl_jax.data.sentences import PAD, Sentences
from ssl_jax.evals import features, knn, metrics
from ssl_jax.run.builder import Run
from ssl_jax.run.state import State
from ssl_jax.workdir import metric_log
from ssl_jax.workdir.files import write_text

ALIKE = 4.0  # the score, of 5, from which a pair counts as two ways to say the same (Gao et al. 2021)
MEASURED = 'stsb'  # the set whose sentences alignment and uniformity are of, where it is there


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Pairs of sentences, and how alike people find them."""

  first: list[str]
  second: list[str]
  score: np.ndarray  # float64 [n]


def read(folder: str) -> dict[str, Pairs]:
  """The pairs of each NAME.tsv of a folder, whose columns are a split or part, a score and two sentences.

  Where a set has a split 'test' its pairs alone are judged; parts of other names are judged as one set, which is the
  setting called "all".
  """
  path = pathlib.Path(folder).expanduser()
  files = sorted(path.glob('*.tsv')) if path.is_dir() else []
  if not files:
    raise ValueError(f'eval.sts = {folder!r} is no folder with .tsv files: give one with sts12.tsv, stsb.tsv, ...')
  return {file.stem: _read(file) for file in files}


def _read(file: pathlib.Path) -> Pairs:
  rows = []
  with file.open(encoding='utf-8') as lines:
    try:
      for number, line in enumerate(lines, start=1):  # noqa: B007
        part, score, first, second = line.rstrip('\n').split('\t')
        rows.append((part, float(score), first, second))
        if not math.isfinite(rows[-1][1]):
          raise ValueError(f'a score of {score}')
    except ValueError as error:
      mend = 'give a split, a score and two sentences, parted by tabs'
      raise ValueError(f'eval.sts: line {number} of {file} is no pair ({error}): {mend}') from error
  rows = [row for row in rows if row[0] == 'test'] or rows
  _, score, first, second = zip(*rows, strict=True) if rows else ((),) * 4
  if len(set(score)) < 2:
    raise ValueError(f'eval.sts: {file} has fewer than two different scores, which rank nothing: remove it')
  return Pairs(list(first), list(second), np.array(score))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
  """The correlation of two rankings, in percent; where one ranks nothing it is 0.  [n], [n]"""
  ranks = [rankdata(values) for values in (x, y)]
  if any(np.ptp(rank) == 0 for rank in ranks):
    return 0.0
  return 100 * float(np.corrcoef(*ranks)[0, 1])


class Evaluator:
  """What a run of sentences is judged by, on the way and at the end."""

  def __init__(self, run: Run):
    self.run, choice = run, run.config.eval
    self.sources = {}  # of images, there are none
    if not choice.sts:
      raise ValueError("eval.sts = '' names no pairs of sentences: give the folder with sts12.tsv, stsb.tsv, ...")
    self.pairs = read(choice.sts)
    lines = [line for pairs in self.pairs.values() for line in (*pairs.first, *pairs.second)]
    self._place = {line: place for place, line in enumerate(dict.fromkeys(lines))}
    # Nothing is cut that the encoder has a position for, and the many short sentences do not pay for the long ones.
    tokens = run.train.vocabulary.encode(list(self._place), run.method.network.encoder.positions)
    lengths = np.count_nonzero(tokens != PAD, axis=1)
    short, most = lengths <= run.config.data.tokens, lengths.max()
    groups = [(np.flatnonzero(short), run.config.data.tokens), (np.flatnonzero(~short), most)]
    self._groups = [(places, Sentences(tokens[places, :size], run.train.vocabulary)) for places, size in groups]
    self._apply = features.extractor(run.method, run.normalize, run.devices)

  def scores(self, state: State) -> dict[str, float]:
    """{'spearman_mean': percent, 'spearman_sts12': percent, ...}; the state is on devices."""
    self.latest = self._features(state)[self.run.config.eval.features]  # for the neighbours
    return self._ranked(self.latest)

  def at_start(self, state: State) -> dict[str, float]:
    """The same of the encoder before training; the state is a host's."""
    return self.scores(self.run.devices.replicate(state))

  def judge(self, state: State, workdir: pathlib.Path) -> dict:
    """Everything of the state, a host's: evaluation.json."""
    found = self._features(self.run.devices.replicate(state))
    layer = self.run.config.eval.features
    results = {
      'step': int(state.step),
      'epoch': int(state.step) / self.run.steps_per_epoch,
      'data': {'name': self.run.config.data.name, 'pairs': {name: len(p.score) for name, p in self.pairs.items()}},
      'settings': relevant(self.run.config.eval, 'eval.'),
      'features': layer,
      **self._ranked(found[layer]),
      'images': {'train': len(self.run.train), 'test': len(self._place)},  # sentences
      'measures': {layer: self._measures(x) for layer, x in found.items()} if MEASURED in self.pairs else {},
    }
    metric_log.write_evaluation(workdir, results, {}, f'step {results["step"]}')
    return results

  def draw_neighbours(self, path: pathlib.Path, rows: int = 10, per_row: int = 3) -> None:
    """In the place of a picture, a text: sentences, and below each those that are nearest by the last scores."""
    lines = list(self._place)
    chosen = np.arange(min(rows, len(lines))) * (len(lines) // min(rows, len(lines)))
    nearest, cosines = knn.neighbours(self.latest, self.latest[chosen], min(per_row + 1, len(lines)))
    told = []
    for query, places, found in zip(chosen, nearest, cosines, strict=True):
      others = [(place, s) for place, s in zip(places, found, strict=True) if place != query][:per_row]
      told += [lines[query], *(f'  {s:.2f}  {lines[place]}' for place, s in others), '']
    if jax.process_index() == 0:
      write_text(path.with_suffix('.txt'), '\n'.join(told))

  def _features(self, state: State) -> dict[str, np.ndarray]:
    """Of all sentences, once each, of length 1."""
    found = {}
    for places, source in self._groups:
      if len(places):
        settings = dict(size=source.items.shape[1], batch_size=self.run.config.eval.batch_size)
        part, _ = features.extract(self._apply, self.run.devices, *state.evaluated, source, **settings)
        for layer, x in part.items():
          whole = found.setdefault(layer, np.empty((len(self._place), x.shape[1]), x.dtype))
          whole[places] = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return found

  def _both(self, pairs: Pairs, x: np.ndarray) -> list[np.ndarray]:
    return [x[[self._place[line] for line in lines]] for lines in (pairs.first, pairs.second)]

  def _ranked(self, x: np.ndarray) -> dict[str, float]:
    cosines = {name: np.multiply(*self._both(pairs, x)).sum(axis=1) for name, pairs in self.pairs.items()}
    found = {f'spearman_{name}': spearman(cosines[name], pairs.score) for name, pairs in self.pairs.items()}
    return {'spearman_mean': float(np.mean(list(found.values()))), **found}

  def _measures(self, x: np.ndarray) -> Mapping[str, float]:
    """Uniformity of the sentences of STS-B, and alignment of its pairs that say the same."""
    pairs = self.pairs[MEASURED]
    first, second = self._both(pairs, x)
    alike = pairs.score >= ALIKE
    found = {'uniformity': metrics.uniformity(np.concatenate([first, second]))}
    if alike.any():
      found['alignment'] = metrics.alignment(np.stack([first[alike], second[alike]]))
    return {name: float(value) for name, value in found.items()}
