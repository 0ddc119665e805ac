"""Figures 4 to 9 of Wang & Liu 2021 and those of its supplement, drawn from the results so far.

  python -m experiments.behaviour.figures

writes for each dataset, next to this file: temperatures.svg (accuracy, Fig. 9; uniformity, Fig. 4 and 6; tolerance,
Fig. 5 and 7), separation.svg (Fig. 8; supplement, Fig. 1 to 7) and similarities.svg. Except for CIFAR-10, file names
end with the dataset, such as temperatures_svhn.svg. It also lists the missing rows.
"""

import pathlib
import statistics
import sys
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import tables
from experiments.behaviour.sweep import DATA, SWEEP, TAUS, Data
from ssl_jax.reporting.figures import COLORS, INK, MARKS, draw_similarities, style, write_svg

FOLDER = pathlib.Path(__file__).parent


@style()
def against_temperature(results: tables.Results, data: Data = DATA[0]) -> Figure:
  """Accuracy, uniformity and tolerance of the ordinary and the hard loss against τ: ours, and the published values."""
  figure = Figure(figsize=(2.8 * len(SWEEP.columns), 3.4), layout='constrained')
  axes = figure.subplots(1, len(SWEEP.columns))
  for axis, column in zip(axes, SWEEP.columns, strict=True):
    _draw_against_temperature(axis, column, results, data)
  figure.legend(*axes[0].get_legend_handles_labels(), loc='outside upper center', ncols=3)
  return figure


def _draw_against_temperature(axis, column: tables.Column, results: tables.Results, data: Data) -> None:
  rows = {row.name: row for row in SWEEP.rows}
  for color, mark, loss in zip(COLORS, MARKS, ('contrastive', 'hard'), strict=False):
    names = {tau: f'{data.prefix}{loss}_{tau}' for tau in TAUS}
    here = [(tau, column.values(results.get(name, ()))) for tau, name in names.items()]
    here = [(tau, statistics.mean(values)) for tau, values in here if values]
    there = [(tau, rows[name].published.get(column.metric)) for tau, name in names.items()]
    there = [(tau, np.mean(value)) for tau, value in there if value is not None]
    common = dict(color=color, marker=mark, markersize=5)
    axis.plot(*zip(*there, strict=True), linestyle=':', markerfacecolor='none', label=f'{loss}, paper', **common)
    if here:
      axis.plot(*zip(*here, strict=True), label=f'{loss}, here', **common)
  for color, name in ((COLORS[3], 'simple'), (COLORS[4], 'hard_simple')):
    if values := column.values(results.get(f'{data.prefix}{name}', ())):
      label = f'{name.replace("_", " ")}, here'
      axis.axhline(statistics.mean(values), color=color, linestyle='--', linewidth=1.2, label=label)
  axis.set(xlabel='temperature τ', ylabel=column.title)


def _panels(results: Sequence[tables.Results]) -> tuple[Figure, list[tuple]]:
  """One panel per row, with the curves of its first seed. Each element of `results` starts a new line of panels."""
  columns = min(6, max(map(len, results)))
  chunks = lambda rows: [rows[i : i + columns] for i in range(0, len(rows), columns)]
  lines = [line for found in results for line in chunks(list(found.items()))]
  figure = Figure(figsize=(max(2 * columns, 3.6), 2.1 * len(lines)), layout='constrained')
  axes = figure.subplots(len(lines), columns, sharex=True, sharey=True, squeeze=False)
  titles = {row.name: row.title for row in SWEEP.rows}
  panels = []
  for place, (line, rows) in enumerate(zip(axes, lines, strict=True)):
    below = max(map(len, lines[place + 1 :]), default=0)
    for column, axis in enumerate(line):
      axis.set_visible(column < len(rows))
      axis.tick_params(labelbottom=column >= below)  # the last panel of a column has the labels
    for axis, (name, found) in zip(line, rows, strict=False):
      axis.set_title(textwrap.fill(titles[name], 27), fontsize=9)
      panels.append((axis, found[0]['curves']))
  return figure, panels


@style()
def separation(results: Sequence[tables.Results]) -> Figure:
  """Mean similarity of the positive and of the ten nearest negatives, ± one standard deviation."""
  figure, panels = _panels(results)
  for axis, curves in panels:
    mean, std = curves['separation_mean'], curves['separation_std']
    colors = [COLORS[2]] + [COLORS[0]] * (len(mean) - 1)
    axis.bar(range(len(mean)), mean, yerr=std, color=colors, ecolor=INK, error_kw={'elinewidth': 0.8})
    axis.set_xticks(range(len(mean)), ['pos', *map(str, range(1, len(mean)))], fontsize=7)
    axis.grid(False, axis='x')
  figure.supxlabel('positive (pos), then the nearest negatives', fontsize=9)
  figure.supylabel('cosine similarity', fontsize=9)
  return figure


@style()
def similarities(results: Sequence[tables.Results]) -> Figure:
  """Densities of the similarities of true positives, false negatives and true negatives."""
  figure, panels = _panels(results)
  for axis, curves in panels:
    draw_similarities(axis, curves)
    axis.set(xlim=(-1, 1), yscale='log', ylim=(1e-3, 1e2))
    axis.set_yticks([0.01, 1, 100], ['0.01', '1', '100'])  # the style turns off the math of matplotlib's own labels
  handles, labels = panels[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside upper center', ncols=3)
  figure.supxlabel('cosine similarity', fontsize=9)
  figure.supylabel('density', fontsize=9)
  return figure


def of_data(data: Data, found: tables.Results) -> dict[str, Figure]:
  """{name: figure} of a dataset, with the losses of the paper and the triplet loss, the limit for τ → 0."""
  losses = [[f'{loss}_{tau}' for tau in TAUS] for loss in ('contrastive', 'hard')] + [[*data.simple, 'triplet']]
  names = [[f'{data.prefix}{name}' for name in line] for line in losses]
  shown = [line for line in ({name: found[name] for name in line if name in found} for line in names) if line]
  if not shown:
    return {}
  drawn = {'temperatures': against_temperature(found, data)}
  drawn |= {'separation': separation(shown), 'similarities': similarities(shown)}
  return {f'{name}_{data.name}' if data.name else name: figure for name, figure in drawn.items()}


def main(results: pathlib.Path = FOLDER, out: pathlib.Path = FOLDER) -> list[pathlib.Path]:
  """Draws all figures that have results, and returns their files."""
  found = tables.by_row(SWEEP, results)
  if lacking := [row.name for row in SWEEP.rows if row.name not in found]:
    print(f'not run yet: {", ".join(lacking)}')
  drawn = {name: figure for data in DATA for name, figure in of_data(data, found).items()}
  for name, figure in drawn.items():
    write_svg(figure, out / f'{name}.svg')
  return [out / f'{name}.svg' for name in drawn]


if __name__ == '__main__':
  print('\n'.join(map(str, main(*map(pathlib.Path, sys.argv[1:])))))
