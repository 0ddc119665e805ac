"""Figures 6 and 7 of CACR (Zheng et al. 2023): one query with its positives and negatives, for a trained encoder.

  python -m experiments.cacr.samples weights runs/cacr/cacr_k4_seed0
  python -m experiments.cacr.samples tsne runs/cacr/cl_epoch_1_seed0 runs/cacr/cl_epoch_20_seed0 runs/cacr/cl_seed0 ...

The first writes weights.png into the workdir (Fig. 6): the query, its four positives with their weights, and the four
negatives with the largest and with the smallest weights. The second writes tsne.svg into the last workdir (Fig. 7): one
panel per workdir, with the query in the center, its positives and its negatives. The rows of Figure 7 are runs of 1, 20
and 200 epochs. t-SNE needs scikit-learn (pip install -e '.[tsne]').
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import trained
from experiments.behaviour import tsne
from ssl_jax.data.views import image_views
from ssl_jax.evals import features
from ssl_jax.reporting.figures import COLORS, style, write_svg
from ssl_jax.run.update import example_keys, make_views

BATCH, POSITIVES, SHOWN = 128, 4, 4
WIDEST = 10.0  # half the side of a panel in Figure 7, in units of t-SNE


class Sample(NamedTuple):
  """A query, its positives and its negatives: unit embeddings and pictures of the views."""

  query: np.ndarray  # [D]
  positives: np.ndarray  # [K, D]
  negatives: np.ndarray  # [M, D]
  pictures: np.ndarray  # uint8 [1 + K + M, H, W, 3], in this order
  t_pos: float
  t_neg: float


def sample(workdir: pathlib.Path, batch: int = BATCH, query: int = 0, seed: int = 0) -> Sample:
  """Views of `batch` test images, embedded by the newest checkpoint. The query is the first view of image `query`.

  Its positives are other views of that image. Its negatives are the first views of the other images.
  """
  run, state = trained.restore(workdir)
  chosen = run.config
  positions = np.random.default_rng(seed).permutation(len(run.eval_test))[:batch]
  stored = chosen.data.stored_size or chosen.data.image_size
  images, _ = features.squares(run.eval_test, positions, stored)
  views = image_views(chosen, on_device=True)
  augments = [views.training[0]] * (1 + POSITIVES)
  made = jax.jit(lambda keys, x: make_views(augments, keys, x))(
    example_keys(seed, jnp.int32(0), jnp.arange(len(images))), images
  )
  # The query, its positives, and the first views of the others.
  shown = np.concatenate([[view[query] for view in made], np.delete(np.asarray(made[0]), query, axis=0)])
  found = jax.jit(run.method.features)(*state.evaluated, shown)['projector']
  unit = np.asarray(found) / np.linalg.norm(found, axis=1, keepdims=True)
  temperatures = [float(chosen.loss.get(key, default)) for key, default in (('t_pos', 1.0), ('t_neg', 2.0))]
  pictures = views.to_pixels(shown)
  return Sample(unit[0], unit[1 : 1 + POSITIVES], unit[1 + POSITIVES :], pictures, *temperatures)


def weights(found: Sample) -> tuple[np.ndarray, np.ndarray]:
  """π⁺ of the positives and π⁻ of the negatives (Eq. 3 and 4).  -> [K], [M]"""

  def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()

  far = lambda others: 2 - 2 * others @ found.query
  return softmax(found.t_pos * far(found.positives)), softmax(-found.t_neg * far(found.negatives))


@style()
def draw_weights(found: Sample) -> Figure:
  """Figure 6: pictures with their weights."""
  near, apart = weights(found)
  order = np.argsort(-apart)
  rows = {
    'positives': [(1 + k, near[k]) for k in range(len(near))],
    'largest weights': [(1 + len(near) + j, apart[j]) for j in order[:SHOWN]],
    'smallest weights': [(1 + len(near) + j, apart[j]) for j in order[-SHOWN:]],
  }
  figure = Figure(figsize=(1.3 * (1 + SHOWN), 4.6), layout='constrained')
  axes = figure.subplots(3, 1 + SHOWN)
  for axis in axes.ravel():
    axis.set_axis_off()
  axes[0, 0].imshow(found.pictures[0])
  axes[0, 0].set_title('query', fontsize=8)
  for line, (title, members) in zip(axes, rows.items(), strict=True):
    line[0].text(0.5, -0.15, title, ha='center', transform=line[0].transAxes, fontsize=8)
    for axis, (place, weight) in zip(line[1:], members, strict=False):
      axis.imshow(found.pictures[place])
      axis.set_title(f'{weight:.3g}', fontsize=8)
  return figure


def plane(found: Sample, seed: int = 0) -> np.ndarray:
  """t-SNE with the query at the origin: the query, its positives, its negatives.  -> [1 + K + M, 2]"""
  points = tsne.plane(np.concatenate([found.query[None], found.positives, found.negatives]), seed)
  return points - points[:1]


@style()
def draw_planes(panels: dict[str, tuple[np.ndarray, int, float]]) -> Figure:
  """Figure 7: {title: (points, number of positives, t_neg)}; the dashed circle has radius t⁻."""
  from matplotlib.patches import Circle

  figure = Figure(figsize=(2.6 * len(panels), 2.8), layout='constrained')
  for axis, (title, (points, count, radius)) in zip(
    figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
  ):
    axis.scatter(*points[1 + count :].T, s=8, color=COLORS[1], label='negatives')
    axis.scatter(*points[1 : 1 + count].T, s=16, color=COLORS[0], label='positives')
    axis.scatter(*points[0], s=24, color=COLORS[2], label='query')
    axis.add_patch(Circle((0, 0), radius, fill=False, linestyle='--', linewidth=0.8))
    axis.set(title=title, xlim=(-WIDEST, WIDEST), ylim=(-WIDEST, WIDEST), aspect='equal')
  axis.legend(fontsize=6)
  return figure


def main(what: str, workdirs: Sequence[pathlib.Path]) -> pathlib.Path:
  """Draws one of the figures, and returns its file."""
  if what not in ('weights', 'tsne') or not workdirs:
    raise ValueError(f'{what!r} is not a figure of workdirs: give weights WORKDIR, or tsne WORKDIR ...')
  if what == 'weights':
    out = workdirs[0] / 'weights.png'
    draw_weights(sample(workdirs[0])).savefig(out, dpi=150)
    return out
  panels = {}
  for workdir in workdirs:
    found = sample(workdir)
    panels[workdir.name] = plane(found), len(found.positives), found.t_neg
  out = workdirs[-1] / 'tsne.svg'
  write_svg(draw_planes(panels), out)
  return out


if __name__ == '__main__':
  try:
    name, *places = sys.argv[1:] or ['']
    print(main(name, [pathlib.Path(place) for place in places]))
  except ValueError as error:
    sys.exit(f'samples: {error}')
