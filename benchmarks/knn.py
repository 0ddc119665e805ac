"""kNN class scores (k = 200, exp(s / 0.1)) of 10,000 features against 50,000 of width 512, and uniformity.

  python -m benchmarks.knn [--quick]

`--quick` uses a tenth of them. Features start on the device, or in host memory for scikit-learn, which always runs on
the CPU. Scores end in host memory. Uniformity is over all pairs of queries; torch.pdist stores all distances at once.
"""

import functools
from types import ModuleType

import jax
import numpy as np
from jax.typing import ArrayLike

from benchmarks import timing
from benchmarks.timing import torch
from ssl_jax.evals import knn, metrics

K, TAU, CLASSES, WIDTH, BLOCK = 200, 0.1, 10, 512, 1000
TIE = 1e-5  # similarities that differ by less may be ordered differently by two libraries


def features(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Unit vectors around the centers of ten overlapping classes, and their classes.  -> [n, 512], [n]"""
  centres = np.random.default_rng(0).standard_normal((CLASSES, WIDTH), np.float32)
  rng = np.random.default_rng(seed)
  labels = rng.integers(CLASSES, size=number, dtype=np.int32)
  x = centres[labels] + 6 * rng.standard_normal((number, WIDTH), np.float32)
  return x / np.linalg.norm(x, axis=1, keepdims=True), labels


def ours(bank: jax.Array, labels: np.ndarray, queries: jax.Array) -> np.ndarray:
  """-> [q, classes]"""
  return knn.classify(bank, labels, queries, k=(K,), temperature=TAU, num_classes=CLASSES)[K]


def torch_scores(bank, labels, queries):
  """In blocks of queries; the vote is a scatter.  -> [q, classes]"""
  bank, scores = torch.nn.functional.normalize(bank), []
  for rows in torch.nn.functional.normalize(queries).split(BLOCK):
    similarities, indices = (rows @ bank.T).topk(K)
    votes = torch.zeros(len(rows), CLASSES, device=rows.device)
    scores.append(votes.scatter_add_(1, labels[indices], ((similarities - similarities[:, :1]) / TAU).exp()))
  return torch.cat(scores).cpu()


def sklearn_scores(neighbors: ModuleType, bank: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
  """Uses distances, for which scikit-learn is fast: for unit vectors s = 1 − d² / 2.  -> [q, classes]"""
  weights = lambda distance: np.exp((1 - distance**2 / 2) / TAU)
  return neighbors.KNeighborsClassifier(K, weights=weights, algorithm='brute').fit(bank, labels).predict_proba(queries)


def torch_uniformity(x, t: float = 2.0) -> float:
  return torch.pdist(x).square_().mul_(-t).exp_().mean().log().item()


def assert_same_scores(similarities: np.ndarray, mine: ArrayLike, theirs: ArrayLike) -> None:
  """Compares scores up to a factor per query. Rounding may swap neighbors that tie with the k-th.

  Each swap may move a vote to another class. `similarities`: those of the nearest neighbors, some more than k, [q, >k].
  """
  votes = np.exp((similarities - similarities[:, :1]) / TAU)
  ties = (np.abs(similarities - similarities[:, K - 1 : K]) < TIE).sum(1) - 1
  allowed = 1e-3 + ties * votes[:, K - 1] / votes[:, :K].sum(1)
  mine, theirs = (np.asarray(x) / np.asarray(x).sum(1, keepdims=True) for x in (mine, theirs))
  difference = np.abs(theirs - mine).max(1)
  assert np.all(difference <= allowed), f'{(difference > allowed).sum()} of {len(mine)} queries have other scores'


def main() -> None:
  quick = timing.arguments(__doc__).quick
  timing.compile_as_main()
  if torch is not None:
    torch.set_float32_matmul_precision('highest')  # some builds of torch default to TF32
  (bank, labels), (queries, _) = features(5_000 if quick else 50_000, 1), features(1_000 if quick else 10_000, 2)
  neighbors = timing.optional('sklearn.neighbors')
  search = {'ssl_jax.evals.knn': functools.partial(ours, jax.device_put(bank), labels, jax.device_put(queries))}
  search['torch, blocks of 1,000'] = timing.WITHOUT_TORCH
  search['scikit-learn, CPU'] = 'scikit-learn is not installed'
  pairs = {'ssl_jax.evals.metrics': functools.partial(metrics.uniformity, jax.device_put(queries))}
  pairs['torch.pdist'] = timing.WITHOUT_TORCH
  if timing.torch_runs():
    tensors = [torch.tensor(x, device=timing.device()) for x in (bank, labels.astype(np.int64), queries)]
    search['torch, blocks of 1,000'] = functools.partial(torch_scores, *tensors)
    pairs['torch.pdist'] = functools.partial(torch_uniformity, tensors[2])
  if neighbors:
    search['scikit-learn, CPU'] = functools.partial(sklearn_scores, neighbors, bank, labels, queries)
  table = timing.Table(__doc__, quick, 'queries')
  same = functools.partial(assert_same_scores, knn.neighbors(bank, queries, K + 20)[1])
  table.compare(f'kNN, {len(bank):,}', search, same=same, items=len(queries))
  table.compare(f'uniformity, {len(queries):,}', pairs, same=timing.assert_close, items=len(queries))


if __name__ == '__main__':
  main()
