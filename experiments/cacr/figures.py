"""Figures 3 to 5 and 8 to 10 of CACR (Zheng et al. 2023), drawn from the results so far.

  python -m experiments.cacr.figures

writes entropy.svg (Fig. 3 to 5: conditional entropy over the epochs), batch_sizes.svg (Fig. 8), positives.svg (Fig. 9)
and epochs.svg (Fig. 10: linear accuracy over the epochs) next to this file, and prints how many rows were run. Rows on
ImageNet (Fig. 9) are in experiments/cacr_imagenet. experiments.cacr.samples draws Figures 6 and 7 from workdirs.
"""

import math
import pathlib
import statistics
import sys
from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments import tables
from experiments.cacr.sweep import ENTROPY, LINEAR, MAIN, METHODS, SETS, SWEEP
from ssl_jax.reporting.figures import COLORS, INK, MARKS, style, write_svg

FOLDER = pathlib.Path(__file__).parent
TITLES = {'cifar10': 'CIFAR-10', 'cifar100': 'CIFAR-100', 'stl10': 'STL-10'}
BATCHES, POSITIVES = (64, 128, 256, 512, 768), (1, 2, 4, 6, 8, 10)


def prefixed(data: str, name: str) -> str:
  """The name of a row on a dataset.

  >>> prefixed('cifar10', 'cl'), prefixed('stl10', 'cl')
  ('cl', 'stl10_cl')
  """
  return name if data == 'cifar10' else f'{data}_{name}'


def accuracy(results: tables.Results, name: str) -> float | None:
  """The linear accuracy of a row, averaged over seeds; None if it was not run."""
  values = [result['metrics'][LINEAR] for result in results.get(name, ()) if LINEAR in result['metrics']]
  return statistics.mean(values) if values else None


def batch_row(data: str, name: str, batch: int) -> str:
  own = 128 if name in ('cmc', 'cacr_k4') else 768
  return prefixed(data, name if batch == own else f'{name}_batch_{batch}')


def _axes(count: int) -> tuple[Figure, list]:
  figure = Figure(figsize=(3.2 * count, 3.1), layout='constrained')
  return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _line(axis, place: int, points: Sequence[tuple[float, float]], label: str) -> None:
  look = dict(color=COLORS[place], marker=MARKS[place % len(MARKS)], markersize=4)
  axis.plot(*zip(*points, strict=True), label=label, **look)


@style()
def batch_sizes(results: tables.Results) -> Figure:
  """Figure 8: linear accuracy against the batch size, one panel per dataset, one line per method."""
  figure, axes = _axes(len(SETS))
  for axis, data in zip(axes, SETS, strict=True):
    for place, name in enumerate(METHODS):
      points = [(n, accuracy(results, batch_row(data, name, n))) for n in BATCHES]
      if found := [(n, value) for n, value in points if value is not None]:
        _line(axis, place, found, MAIN[name].title)
    axis.set(title=TITLES[data], xlabel='batch size', xticks=BATCHES)
  axes[0].set_ylabel('linear, %')
  if axes[0].get_legend_handles_labels()[0]:
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=3, fontsize=7)
  return figure


@style()
def positives(results: tables.Results) -> Figure:
  """Figure 9: linear accuracy of CACR against the number of positives."""
  figure, axes = _axes(2)
  for axis, data in zip(axes, SETS, strict=False):
    points = [(k, accuracy(results, prefixed(data, f'cacr_k{k}'))) for k in POSITIVES]
    if found := [(k, value) for k, value in points if value is not None]:
      _line(axis, 0, found, 'CACR')
    axis.set(title=TITLES[data], xlabel='positives K', xticks=POSITIVES)
  axes[0].set_ylabel('linear, %')
  return figure


def _history(results: tables.Results, name: str, metric: str) -> list[tuple[float, float]]:
  """(epoch, value) of the first seed."""
  found = results.get(f'{name}_curve') or [{}]
  return [(float(epoch), float(value)) for epoch, value in found[0].get('history', {}).get(metric, ())]


@style()
def epochs(results: tables.Results) -> Figure:
  """Figure 10: linear accuracy over the epochs, one panel per dataset."""
  figure, axes = _axes(len(SETS))
  for axis, data in zip(axes, SETS, strict=True):
    for place, name in enumerate(METHODS):
      if points := _history(results, prefixed(data, name), 'linear'):
        _line(axis, place, points, MAIN[name].title)
    axis.set(title=TITLES[data], xlabel='epoch')
  axes[0].set_ylabel('linear without augmentation, %')
  axes[0].legend(fontsize=6)
  return figure


@style()
def entropy(results: tables.Results) -> Figure:
  """Figures 3 to 5: conditional entropy of the projections over the epochs; dotted: its largest value, log(M - 1).

  There are two largest values: mini-batches have M = 768 images with one positive, and 128 with four.
  """
  panels = {('cifar10', ''): 'Fig. 3', ('cifar10', '_linear'): 'Fig. 3', ('cifar100', ''): 'Fig. 4'}
  panels |= {('cifar100', '_linear'): 'Fig. 4'}
  panels |= {(data, '_exponential'): 'Fig. 5' for data in ('cifar10', 'cifar100')}
  figure = Figure(figsize=(9.6, 5.6), layout='constrained')
  axes = figure.subplots(2, 3).ravel()
  for axis, ((data, rule), number) in zip(axes, panels.items(), strict=True):
    for place, name in enumerate(METHODS):
      if points := _history(results, prefixed(data, f'{name}{rule}'), ENTROPY):
        _line(axis, place, points, MAIN[name].title)
    for batch in (128, 768):
      axis.axhline(math.log(batch - 1), color=INK, linestyle=':', linewidth=0.8)
    words = rule.removeprefix('_')
    axis.set(title=f'{number}: {TITLES[data]}{", " * bool(words)}{words}', xlabel='epoch')
  for axis in axes[::3]:
    axis.set_ylabel('H(X⁻|X)')
  axes[0].legend(fontsize=6)
  return figure


FIGURES = {
  'entropy': (entropy, ('Figure 3', 'Figure 4', 'Figure 5')),
  'batch_sizes': (batch_sizes, ('Figure 8',)),
  'positives': (positives, ('Figure 9',)),
  'epochs': (epochs, ('Figure 10',)),
}


def main(results: pathlib.Path = FOLDER, out: pathlib.Path = FOLDER) -> list[pathlib.Path]:
  """Draws all figures with at least two rows that were run, and returns their files."""
  found, written = tables.by_row(SWEEP, results), []
  for name, (draw, items) in FIGURES.items():
    needed = [row.name for row in SWEEP.rows if set(items) & set(row.shows)]
    here = [row for row in needed if row in found]
    print(f'{name}.svg ({", ".join(items)}): {len(here)} of {len(needed)} rows were run')
    if len(here) > 1:
      written.append(out / f'{name}.svg')
      write_svg(draw(found), written[-1])
  return written


if __name__ == '__main__':
  print('\n'.join(map(str, main(*map(pathlib.Path, sys.argv[1:])))))
