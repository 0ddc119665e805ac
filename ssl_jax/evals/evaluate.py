"""Entry points: evaluate the newest checkpoint of a workdir, or features from a file."""

import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ml_collections import ConfigDict

from ssl_jax.data import npz
from ssl_jax.data.sources import Source
from ssl_jax.evals import check, from_features, settings
from ssl_jax.evals.image_evaluator import ImageEvaluator, chosen_k
from ssl_jax.evals.image_text_evaluator import ImageTextEvaluator
from ssl_jax.evals.sentence_evaluator import SentenceEvaluator
from ssl_jax.run import builder
from ssl_jax.run.state import State
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

# The arrays that an .npz file of features must contain.
KEYS = ('train_features', 'train_labels', 'test_features', 'test_labels')


class Evaluator(Protocol):
  """The interface of an evaluator. Evaluators do not plot: `reporting.neighbors` draws what `neighbors` returns."""

  run: builder.Run
  sources: dict[str, Source]  # the images by split; empty for sentences

  def scores(self, state: State) -> dict[str, float]:
    """Quick scores that are logged during training. The state is on the devices."""

  def at_start(self, state: State) -> dict[str, float]:
    """`scores` and baselines before training. The state is on the host."""

  def evaluate(self, state: State, workdir: pathlib.Path) -> dict:
    """Runs every evaluation enabled in the config and writes evaluation.json. The state is on the host."""

  def neighbors(self) -> Any:
    """Some test examples and their nearest neighbors. Call `scores` or `evaluate` first."""


EVALUATORS: dict[str, Callable[[builder.Run], Evaluator]] = {
  'images': ImageEvaluator,
  'sentences': SentenceEvaluator,
  'pairs': ImageTextEvaluator,
}


def evaluator_of(run: builder.Run) -> Evaluator:
  """The evaluator for the run's modality."""
  return EVALUATORS[run.modality.name](run)


def evaluate(config: ConfigDict, workdir: str) -> dict:
  """Evaluates the newest checkpoint of a workdir. Writes evaluation.json (numbers) and evaluation.npz (figure data).

  On another dataset (`eval.data.name`), the files are evaluation_NAME.json and .npz, so that nothing is overwritten.
  Without a checkpoint, `init` must name the weights to evaluate: a file, or 'random'.
  """
  settings.check(config.eval)
  if config.eval.file:
    return evaluate_features(config.eval.file, workdir, config.eval)
  if not config.init:
    files.read_config(workdir)
  files.writable(workdir, create=False)  # before the data is read
  run = builder.build(config, resumed=files.saved(workdir), trains=False)
  evaluator = evaluator_of(run)
  workdir = files.check(workdir, run.identity)
  state = run.initial_state()
  checkpoints = Checkpoints(workdir)
  if checkpoints.latest() is not None:
    state = checkpoints.restore(state)
  elif not config.init:
    raise ValueError(f'--workdir={str(workdir)!r} has no checkpoint yet: train first')
  else:  # record in config.json which weights were evaluated
    files.claim(workdir, config.to_dict())
  checkpoints.close()
  return evaluator.evaluate(state, workdir)


def evaluate_features(path: str, workdir: str, choices: Mapping) -> dict:
  """Evaluates features of any encoder, from an .npz file with features [n, d] and labels [n] of both splits (`KEYS`).

  `choices` is the config section `eval`. `workdir` must not contain a run.
  """
  if (pathlib.Path(workdir).expanduser() / 'config.json').exists():
    raise ValueError(f'--workdir={str(workdir)!r} holds a run: give another directory for the results of eval.file')
  file = pathlib.Path(path).expanduser()
  if not file.is_file() or not zipfile.is_zipfile(file):
    raise ValueError(f'eval.file = {str(path)!r} is not an .npz file: give one with {", ".join(KEYS)}')
  try:
    stored = npz.read_npz(file, KEYS)
  except npz.BROKEN_ARCHIVE as error:
    raise ValueError(f'eval.file = {str(path)!r} cannot be read ({error}): store plain numbers') from error
  for key in KEYS:
    if key not in stored:
      raise ValueError(f'eval.file = {str(path)!r} has no {key}: give {", ".join(KEYS)}')
  train, train_labels, test, test_labels = (stored[key] for key in KEYS)
  for key in ('train_features', 'test_features'):
    if (dtype := stored[key].dtype).kind not in 'biuf':
      raise ValueError(f'eval.file = {str(path)!r} has {key} of dtype {dtype}: store real numbers, such as float32')
  train_name, test_name = 'eval.file: train_features', 'eval.file: test_features'
  check.same_width(test_name, check.features(test_name, test), train_name, check.features(train_name, train))
  labels = from_features.Labels(train_labels, test_labels).checked(len(train), len(test))
  workdir = files.writable(workdir)
  spaces = {choices['features']: from_features.Space(train, test)}
  choices = {**choices, 'k': chosen_k(choices, labels.train, 'features')}
  numbers, arrays = from_features.evaluate_features(spaces, labels, choices)
  results = {'file': file.name, **numbers}
  metric_log.write_evaluation(workdir, results, arrays)
  return results
