"""Scored pairs are read as each set defines them, and the rank correlation is Spearman's."""

import pathlib

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from ssl_jax.evals import sts
from tests.helpers import REAL, needs_real_data

NUMBERS = st.lists(st.tuples(st.integers(0, 5), st.floats(-1, 1, width=16)), min_size=3, max_size=30)


@given(NUMBERS)
def test_spearman_is_scipy_s_with_ties(pairs):
  x, y = (np.array(values, float) for values in zip(*pairs, strict=True))
  if len(set(x)) == 1 or len(set(y)) == 1:
    assert sts.spearman(x, y) == 0  # scipy returns NaN
  else:
    np.testing.assert_allclose(sts.spearman(x, y), 100 * scipy.stats.spearmanr(x, y).statistic, atol=1e-9)


def test_only_the_test_split_is_read_and_other_parts_are_joined(tmp_path):
  (tmp_path / 'stsb.tsv').write_text('train\t1\ta\tb\ntest\t2\tc\td\ntest\t3.5\te\tf "g"\ndev\t0\th\ti\n')
  (tmp_path / 'sts12.tsv').write_text('MSRpar\t1\ta\tb\nMSRvid\t4\tc\td\n')
  found = sts.read(str(tmp_path))
  assert list(found) == ['sts12', 'stsb']
  assert found['stsb'].first == ['c', 'e'] and found['stsb'].second == ['d', 'f "g"']
  np.testing.assert_array_equal(found['stsb'].score, [2, 3.5])
  np.testing.assert_array_equal(found['sts12'].score, [1, 4])


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('test\t1\ta\tb\ntest\t2\tc\n', r'eval\.sts: line 2 of .*pairs\.tsv is not a valid pair'),
    ('test\tmuch\ta\tb\n', r'eval\.sts: line 1 of .*pairs\.tsv is not a valid pair'),
    ('test\t1\ta\tb\ntest\tnan\ta\tb\n', r'eval\.sts: line 2 of .*pairs\.tsv is not a valid pair \(the score is nan\)'),
    ('test\t1\ta\tb\ntest\t1\tc\td\n', r'eval\.sts: .*pairs\.tsv has fewer than two different scores'),
    ('', r'eval\.sts: .*pairs\.tsv has fewer than two different scores'),
    (b'test\t1\tcaf\xe9\tb\n', r'eval\.sts: .*pairs\.tsv is not UTF-8 text \(.*\): give another file'),
    (None, r"eval\.sts = '.*' must be a folder with \.tsv files"),
  ],
)
def test_invalid_pairs_are_refused(tmp_path, text, message):
  if text is not None:
    (tmp_path / 'pairs.tsv').write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match='^' + message):
    sts.read(str(tmp_path))


@needs_real_data
def test_the_real_sets_have_their_published_sizes():
  found = sts.read(str(pathlib.Path(REAL) / 'text'))
  sizes = dict(sts12=3108, sts13=1500, sts14=3750, sts15=3000, sts16=1186, stsb=1379, sickr=4927)
  assert {name: len(pairs.score) for name, pairs in found.items()} == sizes
