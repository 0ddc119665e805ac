"""Figures 3 to 6 of Lee 2025, drawn from the results so far.

  python -m experiments.balanced.figures

writes grid.svg (accuracy by α and λ, Fig. 4 and 5), bias.svg (accuracy against the prototype bias, Fig. 3) and gaps.svg
(gaps of the bounds during training, Fig. 6) for CIFAR-10. File names for ImageNet end in _imagenet. A cell that has not
been run is empty.
"""

import pathlib
import statistics
import sys
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from experiments import pictures, tables
from experiments.balanced import sweep
from experiments.balanced_imagenet import sweep as imagenet
from ssl_jax.reporting.figures import COLORS, MARKS, style, write_svg

EXPERIMENTS = pathlib.Path(__file__).parent.parent
SWEEPS = {'balanced': ('', sweep.SWEEP), 'balanced_imagenet': ('_imagenet', imagenet.SWEEP)}
ACCURACY, BIAS = 'linear', 'projector/prototype_bias_sampled'


def mean_of(results: tables.Results, name: str, metric: str) -> float:
  """The mean of a metric over the seeds of a row; NaN without results."""
  found = [result['metrics'][metric] for result in results.get(name, ()) if metric in result['metrics']]
  return statistics.mean(found) if found else np.nan


def grid_values(results: tables.Results, loss: str) -> np.ndarray:
  """Linear accuracy of a loss. Rows are λ, columns are α, NaN means not run.  -> [4, 4]"""
  cell = lambda alpha, lam: mean_of(results, f'{loss}_{alpha}_{lam}', ACCURACY)
  return np.array([[cell(alpha, lam) for alpha in sweep.VALUES] for lam in sweep.VALUES])


def grid(results: tables.Results) -> Figure | None:
  """A heat map for each loss, with one color scale."""
  values = {loss: grid_values(results, loss) for loss in sweep.LOSSES}
  if not any(np.isfinite(accuracy).any() for accuracy in values.values()):
    return None
  axes = dict(rows=('λ', sweep.VALUES), columns=('α', sweep.VALUES))
  panels = [pictures.Panel(sweep.LOSSES[loss], accuracy, **axes) for loss, accuracy in values.items()]
  return pictures.heat_maps(panels, 'linear accuracy, %', per_line=2, width=7.2)


@style()
def bias(results: tables.Results) -> Figure | None:
  """Accuracy against the prototype bias, one point per augmentation."""
  names = ('nt_xent', *(f'nt_xent_{name}' for name in imagenet.AUGMENTATIONS))
  points = {name: (mean_of(results, name, BIAS), mean_of(results, name, ACCURACY)) for name in names}
  points = {name: point for name, point in points.items() if np.isfinite(point).all()}
  if not points:
    return None
  figure = Figure(figsize=(4.9, 3.4), layout='constrained')
  axis = figure.subplots()
  for i, (name, point) in enumerate(points.items()):
    title = imagenet.AUGMENTATIONS.get(name.removeprefix('nt_xent_'), 'base')
    axis.scatter(*point, s=60, color=COLORS[i], marker=MARKS[i], label=title)
  axis.set(xlabel='prototype bias', ylabel='linear accuracy, %')
  axis.legend(fontsize=8)
  return figure


@style()
def gaps(results: tables.Results) -> Figure | None:
  """The gaps of the attracting (Eq. 8) and the repelling bound (Eq. 10) during training, of the first seed."""
  found = results.get('bounds', ())
  if not found:
    return None
  figure = Figure(figsize=(4.9, 3.4), layout='constrained')
  axis = figure.subplots()
  for color, mark, (name, points) in zip(COLORS, MARKS, found[0]['history'].items(), strict=False):
    label = name.partition('/')[2].replace('_', ' ')
    axis.plot(*zip(*points, strict=True), color=color, marker=mark, markersize=4, label=label)
  axis.set(xlabel='epoch', ylabel='mean gap', ylim=(0, None))
  axis.legend()
  return figure


FIGURES: dict[str, Callable[[tables.Results], Figure | None]] = {'grid': grid, 'bias': bias, 'gaps': gaps}


def main(results: pathlib.Path = EXPERIMENTS, out: pathlib.Path | None = None) -> list[pathlib.Path]:
  """Draws all figures that have results, and returns their files."""
  files = []
  for folder, (ending, chosen) in SWEEPS.items():
    found = tables.by_row(chosen, results / folder)
    for name, draw in FIGURES.items():
      if figure := draw(found):
        files.append((out or EXPERIMENTS / 'balanced') / f'{name}{ending}.svg')
        write_svg(figure, files[-1])
  return files


if __name__ == '__main__':
  print('\n'.join(map(str, main(*map(pathlib.Path, sys.argv[1:])))))
