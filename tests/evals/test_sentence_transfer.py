"""SentEval's protocol: C is chosen without the test examples, by folds, nested folds or a dev split."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from ssl_jax.evals import sentence_transfer
from tests.helpers import REAL, needs_real_data


def examples(n=60, d=3, classes=2, seed=0):
  """Overlapping clusters: no classifier is perfect, and the choice of C matters."""
  rng = np.random.default_rng(seed)
  labels = rng.permutation(np.arange(n) % classes)
  return (rng.normal(size=(classes, d))[labels] * 0.8 + rng.normal(size=(n, d))).astype(np.float32), labels


def slow_fit(x, y, c, classes):
  """scikit-learn's classifier, as in SentEval."""
  classifier = LogisticRegression(C=c, tol=1e-8, max_iter=10_000).fit(np.float64(x), y)
  assert set(classifier.classes_) == set(range(classes))
  return classifier.predict


def slow_choice(x, y, classes, seed):
  fold = sentence_transfer.folds(y, sentence_transfer.FOLDS, seed)
  means = []
  for c in sentence_transfer.C_VALUES:
    scores = []
    for f in range(sentence_transfer.FOLDS):
      classify = slow_fit(x[fold != f], y[fold != f], c, classes)
      scores.append(np.mean(classify(x[fold == f]) == y[fold == f]))
    means.append(np.mean(scores))
  return sentence_transfer.C_VALUES[int(np.argmax(means))]


def slow_accuracy(x, y, split, classes):
  if 'test' not in split:
    fold, scores = sentence_transfer.folds(y, sentence_transfer.FOLDS, 1), []
    for f in range(sentence_transfer.FOLDS):
      train = fold != f
      classify = slow_fit(x[train], y[train], slow_choice(x[train], y[train], classes, 0), classes)
      scores.append(np.mean(classify(x[~train]) == y[~train]))
    return 100 * np.mean(scores)
  train, test = split == 'train', split == 'test'
  if 'dev' in split:
    dev = split == 'dev'
    scores = [np.mean(slow_fit(x[train], y[train], c, classes)(x[dev]) == y[dev]) for c in sentence_transfer.C_VALUES]
    c = sentence_transfer.C_VALUES[int(np.argmax(scores))]
  else:
    c = slow_choice(x[train], y[train], classes, 0)
  return 100 * np.mean(slow_fit(x[train], y[train], c, classes)(x[test]) == y[test])


@pytest.mark.parametrize('classes', [2, 3])
@pytest.mark.parametrize('splits', [['all'], ['train', 'train', 'test'], ['train', 'dev', 'test']])
@pytest.mark.slow
def test_the_accuracy_is_that_of_slow_loops(splits, classes, monkeypatch):
  monkeypatch.setattr(sentence_transfer, 'FOLDS', 3)
  x, labels = examples(classes=classes)
  split = np.array(splits)[np.arange(len(x)) % len(splits)]
  found = sentence_transfer.accuracy(x, labels, split)
  assert found == pytest.approx(slow_accuracy(x, labels, split, classes), abs=1e-4)
  assert 100 / classes < found < 100


@pytest.mark.slow
def test_the_test_examples_have_no_part_in_the_choice(monkeypatch):
  monkeypatch.setattr(sentence_transfer, 'FOLDS', 3)
  x, labels = examples()
  split = np.array(['train', 'train', 'test'])[np.arange(len(x)) % 3]
  other = np.where(split == 'test', 1 - labels, labels)
  right, wrong = (sentence_transfer.accuracy(x, given, split) for given in (labels, other))
  assert wrong == pytest.approx(100 - right)


def test_folds_are_stratified():
  labels = np.repeat([0, 1, 2], [50, 33, 7])
  fold = sentence_transfer.folds(labels, 10, 0)
  counts = np.array([np.bincount(fold[labels == c], minlength=10) for c in range(3)])
  assert (np.ptp(counts, axis=1) <= 1).all() and np.ptp(counts.sum(axis=0)) <= 1
  np.testing.assert_array_equal(fold, sentence_transfer.folds(labels, 10, 0))
  assert (fold != sentence_transfer.folds(labels, 10, 1)).any()


def test_pairs_are_compared_coordinate_by_coordinate():
  u, v = np.array([[1.0, -2.0]]), np.array([[3.0, 0.5]])
  np.testing.assert_allclose(sentence_transfer.features(u, v), [[2.0, 2.5, 3.0, -1.0]])
  assert sentence_transfer.features(u, None) is u


def test_files_are_read(tmp_path):
  lines = ['train\tno\ta cat\ta dog', 'train\tyes\ta\tb', 'test\tno\tc\td', 'train\tno\te\tf']
  (tmp_path / 'mrpc.tsv').write_text('\n'.join([*lines, 'train\tyes\tg\th']))
  (tmp_path / 'cr.tsv').write_text('all\t0\tbad\nall\t1\tgood\nall\t1\tfine\nall\t0\tpoor\n')
  found = sentence_transfer.read(str(tmp_path))
  assert list(found) == ['cr', 'mrpc']
  assert found['cr'].second is None and found['cr'].label.tolist() == [0, 1, 1, 0]
  assert found['mrpc'].second == ['a dog', 'b', 'd', 'f', 'h'] and found['mrpc'].label.tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('all\t0', r'line 1 of .*bad\.tsv has 2 columns: give a split, a label and one sentence or two'),
    ('all\t0\ta\nall\t1\ta\tb', r'line 2 of .*bad\.tsv has 4 columns'),
    ('all\t0\ta\nall\t0\tb', r'bad\.tsv must have at least two classes'),
    ('test\t0\ta\nall\t1\tb', r"bad\.tsv has a split 'test' and none named 'train'"),
    ('', r'bad\.tsv must have at least two classes'),
    (b'all\t0\tcaf\xe9', r'bad\.tsv is not UTF-8 text \(.*\): give another file'),
  ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, message):
  (tmp_path / 'bad.tsv').write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=f'^eval.transfer: .*{message}'):
    sentence_transfer.read(str(tmp_path))


@needs_real_data
def test_questions_are_classified_by_their_words():
  """The published sizes, and part of TREC with 32 hashed words per question."""
  found = sentence_transfer.read(f'{REAL}/text/transfer')
  sizes = {name: [int(np.sum(given.split == s)) for s in ('train', 'dev', 'test')] for name, given in found.items()}
  assert {name: len(found[name].label) for name in ('mr', 'cr', 'subj', 'mpqa')} == {
    'mr': 10_662,
    'cr': 3775,
    'subj': 10_000,
    'mpqa': 10_606,
  }
  assert sizes['sst2'] == [6920, 872, 1821] and sizes['trec'] == [5452, 0, 500] and sizes['mrpc'] == [4076, 0, 1725]
  trec = found['trec']
  some = np.flatnonzero(trec.split == 'train')[:600].tolist() + np.flatnonzero(trec.split == 'test').tolist()
  x = np.zeros((len(some), 32), np.float32)
  for row, at in zip(x, some, strict=True):
    for word in trec.first[at].lower().split():
      row[sum(map(ord, word)) % 32] += 1
  assert 35 < sentence_transfer.accuracy(x, trec.label[some], trec.split[some]) < 95
