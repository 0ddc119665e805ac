"""Evaluation of sentence encoders: correlation with human similarity scores, and transfer to classification."""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from ssl_jax.arrays import normalize
from ssl_jax.config import relevant
from ssl_jax.data.sentences import PAD, Sentences
from ssl_jax.data.sources import Source
from ssl_jax.evals import features, knn, metrics, sentence_transfer, sts
from ssl_jax.run.builder import Run
from ssl_jax.run.state import State
from ssl_jax.workdir import metric_log, progress

MEASURED = 'stsb'  # the dataset for alignment and uniformity, if available


class SentenceEvaluator:
  """Evaluates a run on the pairs of `eval.sts` and, at the end of training, on the data of `eval.transfer`."""

  def __init__(self, run: Run):
    self.run, folder = run, run.config.eval.sts
    self.sources: dict[str, Source] = {}
    assert isinstance(run.train, Sentences)
    if not folder:
      raise ValueError("eval.sts = '' names no scored pairs: give the folder with sts12.tsv, stsb.tsv, ...")
    self.pairs = sts.read(folder)
    sentences = [line for pairs in self.pairs.values() for line in (*pairs.first, *pairs.second)]
    self._position = {line: position for position, line in enumerate(dict.fromkeys(sentences))}
    self._groups = self._tokenized(list(self._position))
    transfer = run.config.eval.transfer
    self.transfer = sentence_transfer.read(transfer) if transfer else {}
    self._apply = features.extractor(run.method.features, run.views.eval_view, run.devices)

  def scores(self, state: State) -> dict[str, float]:
    """{'spearman_mean': correlation · 100, 'spearman_sts12': ..., ...}. The state is on the devices."""
    self.latest = self._unit_features(state)[self.run.config.eval.features]  # for `neighbors`
    return self._correlations(self.latest)

  def at_start(self, state: State) -> dict[str, float]:
    """`scores` of the untrained encoder. The state is on the host."""
    return self.scores(self.run.devices.replicate(state))

  def evaluate(self, state: State, workdir: pathlib.Path) -> dict:
    """Runs all evaluations and writes evaluation.json. The state is on the host."""
    step, state = int(state.step), self.run.devices.replicate(state)
    say = progress.stages('evaluation')
    say(f'features of {len(self._position):,} sentences')
    found = self._unit_features(state)
    layer = self.run.config.eval.features
    self.latest = found[layer]
    results = {
      'step': step,
      'epoch': self.run.epoch(step),
      'data': {'name': self.run.config.data.name, 'pairs': {name: len(p.score) for name, p in self.pairs.items()}},
      'settings': relevant(self.run.config.eval, 'eval.'),
      'features': layer,
      **self._correlations(self.latest),
      **self._transfer(state, say),
      'sentences': {'train': len(self.run.train), 'test': len(self._position)},
      'measures': {layer: self._measures(x) for layer, x in found.items()} if MEASURED in self.pairs else {},
    }
    metric_log.write_evaluation(workdir, results, {})
    return results

  def neighbors(self, rows: int = 10, per_row: int = 3) -> list[tuple[str, list[tuple[float, str]]]]:
    """Sentences and their nearest neighbors by the latest features: (sentence, [(cosine, sentence), ...])."""
    lines = list(self._position)
    rows = min(rows, len(lines))
    chosen = np.arange(rows) * (len(lines) // rows)
    nearest, cosines = knn.neighbors(self.latest, self.latest[chosen], min(per_row + 1, len(lines)))
    others = lambda i: [(s, lines[at]) for s, at in zip(cosines[i], nearest[i], strict=True) if at != chosen[i]]
    return [(lines[query], others(i)[:per_row]) for i, query in enumerate(chosen)]

  def _tokenized(self, lines: Sequence[str]) -> list[tuple[np.ndarray, Sentences]]:
    """Two groups of sentences, short and long, each with the positions of its sentences.

    Long sentences form their own group, so that the many short ones are not padded to their length. Sentences are
    truncated only at the encoder's last position.
    """
    run = self.run
    assert isinstance(run.train, Sentences)
    tokens = run.train.vocabulary.encode(list(lines), run.method.network.encoder.positions)
    lengths = np.count_nonzero(tokens != PAD, axis=1)
    short, longest = lengths <= run.config.data.tokens, lengths.max()
    groups = [(np.flatnonzero(short), run.config.data.tokens), (np.flatnonzero(~short), longest)]
    return [(positions, Sentences(tokens[positions, :size], run.train.vocabulary)) for positions, size in groups]

  def _features(self, state: State, groups: list[tuple[np.ndarray, Sentences]]) -> dict[str, np.ndarray]:
    """Features of all sentences of the groups, by layer. The state is on the devices."""
    found: dict[str, np.ndarray] = {}
    count = sum(len(positions) for positions, _ in groups)
    for positions, source in groups:
      if len(positions):
        settings = dict(size=source.items.shape[1], batch_size=self.run.config.eval.batch_size)
        part, _ = features.extract(self._apply, self.run.devices, *state.evaluated, source, **settings)
        for layer, x in part.items():
          found.setdefault(layer, np.empty((count, x.shape[1]), x.dtype))[positions] = x
    return found

  def _unit_features(self, state: State) -> dict[str, np.ndarray]:
    """Normalized features of every distinct sentence of the pairs, by layer."""
    return {layer: np.asarray(normalize(x)) for layer, x in self._features(state, self._groups).items()}

  def _transfer(self, state: State, say: Callable[[str], None]) -> dict[str, float]:
    """{'transfer_mean': percent, 'transfer_mr': ..., ...}; empty without `eval.transfer`."""
    found = {}
    for name, given in self.transfer.items():
      lines = list(dict.fromkeys([*given.first, *(given.second or ())]))
      say(f'transfer to {name}, {len(lines):,} sentences')
      position = {line: at for at, line in enumerate(lines)}
      x = self._features(state, self._tokenized(lines))[self.run.config.eval.features]
      parts = [None if part is None else x[[position[line] for line in part]] for part in (given.first, given.second)]
      assert parts[0] is not None
      inputs = sentence_transfer.features(parts[0], parts[1])
      found[f'transfer_{name}'] = sentence_transfer.accuracy(inputs, given.label, given.split)
    return {'transfer_mean': float(np.mean(list(found.values()))), **found} if found else {}

  def _both(self, pairs: sts.ScoredPairs, x: np.ndarray) -> list[np.ndarray]:
    """Features of the first and of the second sentences of the pairs."""
    return [x[[self._position[line] for line in lines]] for lines in (pairs.first, pairs.second)]

  def _correlations(self, x: np.ndarray) -> dict[str, float]:
    cosines = {name: np.multiply(*self._both(pairs, x)).sum(axis=1) for name, pairs in self.pairs.items()}
    found = {f'spearman_{name}': sts.spearman(cosines[name], pairs.score) for name, pairs in self.pairs.items()}
    return {'spearman_mean': float(np.mean(list(found.values()))), **found}

  def _measures(self, x: np.ndarray) -> dict[str, float]:
    """Uniformity of the sentences of STS-B, and alignment of its paraphrases."""
    pairs = self.pairs[MEASURED]
    first, second = self._both(pairs, x)
    alike = pairs.score >= sts.PARAPHRASE
    found = {'uniformity': metrics.uniformity(np.concatenate([first, second]))}
    if alike.any():
      found['alignment'] = metrics.alignment(np.stack([first[alike], second[alike]]))
    return found
