"""The nearest neighbors of some test examples, drawn as a picture or written as text."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ssl_jax.evals.evaluate import Evaluator
from ssl_jax.reporting import figures
from ssl_jax.workdir.files import write_bytes, write_text


def draw(evaluator: Evaluator, workdir: pathlib.Path) -> None:
  """Writes neighbors.png or, for sentences and pairs, neighbors.txt: nearest neighbors by the latest features."""
  if jax.process_index() == 0 and len(found := evaluator.neighbors()):
    DRAW[evaluator.run.modality.name](found, workdir)


def _draw_images(found: dict[str, np.ndarray], workdir: pathlib.Path) -> None:
  """One row per test image: the image, then its nearest training images, framed by class."""
  write_bytes(workdir / 'neighbors.png', figures.neighbors(found['neighbors'], found['neighbors_labels']))


def _write_sentences(found: list[tuple[str, list[tuple[float, str]]]], workdir: pathlib.Path) -> None:
  """Each sentence, followed by the nearest ones with their cosine similarities."""
  lines = []
  for sentence, nearest in found:
    lines += [sentence, *(f'  {cosine:.2f}  {other}' for cosine, other in nearest), '']
  write_text(workdir / 'neighbors.txt', '\n'.join(lines))


DRAW: dict[str, Callable[[Any, pathlib.Path], None]] = {
  'images': _draw_images,
  'sentences': _write_sentences,
  'pairs': _write_sentences,
}
