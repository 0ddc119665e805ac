"""Figure 2 of Wang & Liu 2021: t-SNE of the embeddings of the test images, one panel per run.

  python -m experiments.behaviour.sweep --of='Figure 2'
  python -m experiments.behaviour.tsne

writes tsne.svg next to this file, from the runs of the figure that have a checkpoint in runs/behaviour. For other
workdirs: python -m experiments.behaviour.tsne WORKDIR ... Needs scikit-learn (pip install -e '.[tsne]').
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import trained
from experiments.behaviour.sweep import SWEEP
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.reporting.figures import COLORS, MARKS, style, write_svg

RUNS = pathlib.Path('runs/behaviour')
OUT = pathlib.Path(__file__).parent / 'tsne.svg'
IMAGES = 2000  # test images in a panel
PERPLEXITY = 30.0


def embeddings(workdir: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Normalized projector outputs of the test images at the newest checkpoint, and labels.  -> [n, d], [n]"""
  run, state = trained.restore(workdir)
  spaces, labels = ImageEvaluator(run).spaces(run.devices.replicate(state), layers=('projector',))
  x = spaces['projector'].test
  return x / np.linalg.norm(x, axis=1, keepdims=True), labels.test


def plane(x: np.ndarray, seed: int = 0) -> np.ndarray:
  """t-SNE of cosine distances, initialized with PCA.  [n, d] -> [n, 2]"""
  try:
    from sklearn.manifold import TSNE
  except ImportError:
    raise ValueError("t-SNE needs scikit-learn, which is not installed: pip install -e '.[tsne]'") from None
  settings = dict(perplexity=min(PERPLEXITY, (len(x) - 1) / 3), method='exact' if len(x) < 200 else 'barnes_hut')
  return TSNE(**settings, metric='cosine', init='pca', random_state=seed).fit_transform(x)


@style()
def draw(panels: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
  """{title: (points [n, 2], labels [n])} side by side, with a color and a marker per class."""
  figure = Figure(figsize=(3.4 * len(panels), 3.6), layout='constrained')
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for axis, (title, (points, labels)) in zip(axes, panels.items(), strict=True):
    for i, c in enumerate(np.unique(labels)):
      mark = MARKS[i // len(COLORS) % len(MARKS)]
      axis.scatter(
        *points[labels == c].T, s=5, linewidths=0, color=COLORS[i % len(COLORS)], marker=mark, rasterized=True
      )
    axis.set(title=title, xticks=[], yticks=[], aspect='equal')
    axis.grid(False)
  return figure


def main(workdirs: Sequence[pathlib.Path] = (), out: pathlib.Path = OUT) -> pathlib.Path | None:
  """Draws the given workdirs, by default the runs of Figure 2, and returns the file."""
  titles = {RUNS / f'{row.name}_seed0': row.title for row in SWEEP.of('Figure 2')}
  if not workdirs:
    workdirs = [workdir for workdir in titles if (workdir / 'checkpoints').is_dir()]
    if lacking := [str(workdir) for workdir in titles if workdir not in workdirs]:
      print(f'no checkpoint in {", ".join(lacking)}: run python -m experiments.behaviour.sweep --of="Figure 2"')
  panels = {}
  for workdir in workdirs:
    x, labels = embeddings(workdir)
    chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:IMAGES])
    panels[titles.get(workdir, workdir.name)] = plane(x[chosen]), labels[chosen]
  if not panels:
    return None
  write_svg(draw(panels), out)
  return out


if __name__ == '__main__':
  try:
    if written := main([pathlib.Path(argument) for argument in sys.argv[1:]]):
      print(written)
  except ValueError as error:
    sys.exit(f'tsne: {error}')
