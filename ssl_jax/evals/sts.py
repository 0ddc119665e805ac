"""Semantic textual similarity: pairs of sentences with human scores, and the rank correlation with these scores."""

import dataclasses
import math
import pathlib

import numpy as np
from scipy.stats import rankdata

PARAPHRASE = 4.0  # pairs with at least this score (out of 5) count as paraphrases in `alignment` (Gao et al. 2021)


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
  """Pairs of sentences and their human similarity scores."""

  first: list[str]
  second: list[str]
  score: np.ndarray  # float64 [n]


def read(folder: str) -> dict[str, ScoredPairs]:
  """Reads each NAME.tsv in a folder. The columns are: split or part, score, sentence, sentence.

  If a file has a split named 'test', only its pairs are used. Otherwise all parts are joined (the "all" setting).
  """
  path = pathlib.Path(folder).expanduser()
  files = sorted(file for file in path.glob('*.tsv') if file.is_file()) if path.is_dir() else []
  if not files:
    raise ValueError(f'eval.sts = {folder!r} must be a folder with .tsv files, such as sts12.tsv and stsb.tsv')
  return {file.stem: _read(file) for file in files}


def _read(file: pathlib.Path) -> ScoredPairs:
  rows = []
  for number, line in enumerate(lines_of('eval.sts', file), start=1):
    try:
      part, score, first, second = line.split('\t')
      rows.append((part, float(score), first, second))
      if not math.isfinite(rows[-1][1]):
        raise ValueError(f'the score is {score}')
    except ValueError as error:
      fix = 'give a split, a score and two sentences, separated by tabs'
      raise ValueError(f'eval.sts: line {number} of {file} is not a valid pair ({error}): {fix}') from error
  rows = [row for row in rows if row[0] == 'test'] or rows
  _, score, first, second = zip(*rows, strict=True) if rows else ((),) * 4
  if len(set(score)) < 2:
    raise ValueError(f'eval.sts: {file} has fewer than two different scores, so there is no ranking: remove it')
  return ScoredPairs(list(first), list(second), np.array(score))


def lines_of(key: str, file: pathlib.Path) -> list[str]:
  """The lines of a text file that the config key names. Raises a ValueError if it is not UTF-8."""
  try:
    with file.open(encoding='utf-8') as lines:
      return [line.rstrip('\n') for line in lines]
  except UnicodeDecodeError as error:
    raise ValueError(f'{key}: {file} is not UTF-8 text ({error}): give another file') from error


def spearman(x: np.ndarray, y: np.ndarray) -> float:
  """Spearman's rank correlation times 100; 0 if either is constant.  [n], [n]"""
  ranks = [rankdata(values) for values in (x, y)]
  if any(np.ptp(rank) == 0 for rank in ranks):
    return 0.0
  return 100 * float(np.corrcoef(*ranks)[0, 1])
