"""Transfer of sentence embeddings: logistic regression on the datasets of SentEval (Conneau & Kiela 2018).

The embeddings are frozen and not rescaled. A pair of sentences with embeddings u and v has the features |u − v| and
u · v, coordinate by coordinate. The classifier is scikit-learn's: it minimizes C · Σ cross-entropy + ½ ‖W‖², where W is
one vector if there are two classes. C is chosen without the test examples:

- with a dev and a test split: the best C on the dev split;
- with a test split only: the best mean accuracy in 10-fold cross-validation on the training examples;
- without a test split: nested 10-fold cross-validation, which chooses C on the training examples of each outer fold.
  The accuracy is the mean over the outer folds.

Folds are stratified and fixed by a seed. They differ from those of SentEval, which shuffles with scikit-learn.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.evals import linear
from ssl_jax.evals.sts import lines_of

FOLDS = 10
C_VALUES = tuple(2.0**power for power in range(-2, 4))  # the values of C in SentEval
STEPS = 500  # largest number of L-BFGS steps
SPLITS = ('train', 'dev', 'test')


@dataclasses.dataclass(frozen=True)
class LabeledSentences:
  """Sentences, or pairs of sentences, with classes."""

  split: np.ndarray  # 'train', 'dev' or 'test'; any other value in datasets without splits, [n]
  label: np.ndarray  # integers from 0, [n]
  first: list[str]
  second: list[str] | None


def read(folder: str) -> dict[str, LabeledSentences]:
  """Reads each NAME.tsv in a folder. The columns are: split, label, sentence and, for pairs, second sentence."""
  path = pathlib.Path(folder).expanduser()
  files = sorted(path.glob('*.tsv')) if path.is_dir() else []
  if not files:
    raise ValueError(f'eval.transfer = {folder!r} must be a folder with .tsv files, such as mr.tsv and trec.tsv')
  return {file.stem: _read(file) for file in files}


def _read(file: pathlib.Path) -> LabeledSentences:
  rows: list[list[str]] = []
  for number, line in enumerate(lines_of('eval.transfer', file), start=1):
    row = line.split('\t')
    if len(row) not in (3, 4) or (rows and len(row) != len(rows[0])):
      fix = 'give a split, a label and one sentence or two'
      raise ValueError(f'eval.transfer: line {number} of {file} has {len(row)} columns: {fix}')
    rows.append(row)
  split, names, first, *second = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
  label = np.unique(names, return_inverse=True)[1]
  found = LabeledSentences(np.array(split), label, first, second[0] if second else None)
  parts = set(split) & set(SPLITS)
  if 'test' in parts and 'train' not in parts:
    raise ValueError(f"eval.transfer: {file} has a split 'test' and none named 'train': rename the other split")
  train = found.split == 'train' if 'test' in parts else np.ones(len(label), bool)
  counts = np.bincount(label[train], minlength=len(set(names)))
  if len(counts) < 2 or counts.min() < 2:
    raise ValueError(f'eval.transfer: {file} must have at least two classes, each with two training sentences')
  return found


def features(first: np.ndarray, second: np.ndarray | None) -> np.ndarray:
  """The embeddings themselves or, for pairs, |u − v| and u · v.  [n, d] -> [n, d] or [n, 2d]"""
  return first if second is None else np.concatenate([np.abs(first - second), first * second], axis=1)


def folds(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
  """The fold of each example, stratified: each class is spread over the folds as evenly as possible.  [n] -> [n]"""
  rng, found, first = np.random.default_rng(seed), np.empty(len(labels), int), 0
  for label in np.unique(labels):
    members = rng.permutation(np.flatnonzero(labels == label))
    found[members] = (first + np.arange(len(members))) % count  # continues where the last class ended
    first += len(members)
  return found


@functools.partial(jax.jit, static_argnames='classes')
def _hits(x, labels, keep, c_values, *, classes):
  """Whether each example is classified correctly by each of f classifiers.

  Args:
    x: [n, d]; labels: [n].
    keep: the training examples of each classifier, [f, n].
    c_values: C of each classifier, [f].

  Returns:
    [f, n]
  """
  one_hot = jax.nn.one_hot(labels, classes)
  # A target of zeros leaves an example out. Divided by C · n, the objective is a mean over all n plus the penalty.
  targets = jnp.where(keep[:, :, None], one_hot[None], 0)
  fit = jax.vmap(linear.fit_logistic, in_axes=(None, 0, 0, None))
  # With two classes, ours has two vectors, w and -w, and their ½ ‖W‖² is half of that of the one vector 2w.
  penalties = (2 if classes == 2 else 1) / (c_values * len(x))
  params, _ = fit(x, targets, penalties, STEPS)
  logits = jax.vmap(linear.logits, in_axes=(0, None))(params, x)
  return jnp.argmax(logits, axis=2) == labels[None]


def accuracy(x: np.ndarray, labels: np.ndarray, split: np.ndarray, *, seed: int = 0) -> float:
  """Accuracy in percent, by the protocol in the module docstring.  [n, d], [n], [n]"""
  classes, given, examples = int(labels.max()) + 1, jnp.asarray(labels), jnp.asarray(x, jnp.float32)

  def hits(keep, c_values):
    found = _hits(examples, given, jnp.asarray(keep), jnp.asarray(c_values, jnp.float32), classes=classes)
    return np.asarray(found)

  def chosen(train):
    """The C with the best mean cross-validation accuracy on the examples `train`. Ties go to the smallest."""
    fold = np.full(len(labels), -1)
    fold[train] = folds(labels[train], FOLDS, seed)
    held = [fold == f for f in range(FOLDS) if (fold == f).any()]
    keep = np.concatenate([np.stack([train & ~out for out in held])] * len(C_VALUES))
    right = hits(keep, np.repeat(C_VALUES, len(held))).reshape(len(C_VALUES), len(held), -1)
    means = [np.mean([r[out].mean() for r, out in zip(by_fold, held, strict=True)]) for by_fold in right]
    return C_VALUES[int(np.argmax(means))]

  if 'test' not in split:
    fold, found = folds(labels, FOLDS, seed + 1), []
    for f in range(FOLDS):
      if (test := fold == f).any():
        found.append(hits(~test[None], [chosen(~test)])[0][test].mean())
    return 100 * float(np.mean(found))
  train, test = split == 'train', split == 'test'
  if 'dev' in split:
    right = hits(np.stack([train] * len(C_VALUES)), C_VALUES)
    return 100 * float(right[np.argmax(right[:, split == 'dev'].mean(axis=1))][test].mean())
  return 100 * float(hits(train[None], [chosen(train)])[0][test].mean())
