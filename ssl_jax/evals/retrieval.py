"""Image-text retrieval: recall at k in both directions."""

from collections.abc import Sequence

import numpy as np

from ssl_jax.evals.prompts import unit
from ssl_jax.evals.scoring import percent

RANKS = (1, 5, 10)
ROWS = 1000  # queries per block


def recalls(images: np.ndarray, texts: np.ndarray, own: Sequence[Sequence[int]]) -> dict[str, float]:
  """Recall at each of `RANKS`: {'image_to_text_1': percent, ..., 'text_to_image_10': percent}

  Images with the same caption share it: each of them is a correct answer to it. A query is correct at k if fewer than k
  wrong answers are at least as near as its nearest correct answer.

  Args:
    images: [n, d]
    texts: [m, d], distinct texts.
    own: for each image, the positions of its captions in `texts`.
  """
  related = np.zeros((len(images), len(texts)), bool)
  for image, found in enumerate(own):
    related[image, list(found)] = True
  x, y = unit(images), unit(texts)
  wrong = {'image_to_text': _wrong_before(x, y, related), 'text_to_image': _wrong_before(y, x, related.T)}
  return {f'{name}_{k}': percent(count < k) for name, count in wrong.items() for k in RANKS}


def _wrong_before(queries: np.ndarray, keys: np.ndarray, related: np.ndarray) -> np.ndarray:
  """For each query, the number of wrong keys that are at least as near as its nearest correct one.  -> [q]"""
  counts = []
  for start in range(0, len(queries), ROWS):
    s, correct = queries[start : start + ROWS] @ keys.T, related[start : start + ROWS]
    best = np.where(correct, s, -np.inf).max(axis=1, keepdims=True)
    counts.append(((s >= best) & ~correct).sum(axis=1))
  return np.concatenate(counts)
