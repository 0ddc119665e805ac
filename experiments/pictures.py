"""Figures for sweeps: those that a sweep's `--table` draws, and heat maps."""

import math
import pathlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import tables
from ssl_jax.reporting.figures import COLORS, INK, style, write_svg


def draw(sweep: tables.Sweep, folder: pathlib.Path) -> None:
  """Writes results.svg if a row with a published number was run, and the figures that the sweep names."""
  finished, drawn = tables.done(sweep, folder), {}
  if tables.comparable(sweep, finished):
    drawn['results'] = _published_and_here(sweep, finished)
  if results := tables.grouped(sweep, finished):
    drawn |= {name: function(sweep, results) for name, function in sweep.figures.items()}
  for name, figure in drawn.items():
    write_svg(figure, folder / f'{name}.svg')


@style()
def _published_and_here(sweep: tables.Sweep, finished: Mapping):
  """A panel for each config file and column with published numbers, a line for each row that was run.

  Each data set has a config file, and axes of its own because accuracies differ widely between data sets. Whiskers are
  one standard deviation.
  """
  from matplotlib.figure import Figure

  columns, found = tables.comparable(sweep, finished)
  groups: dict[str, list] = {}
  for row, results in found:
    groups.setdefault(row.config.partition(':')[0], []).append((row, results))
  heights, letters = [len(rows) for rows in groups.values()], max(len(row.title) for row, _ in found)
  size = (0.5 + 0.075 * letters + 2.0 * max(len(columns), 2), 0.6 + 0.4 * len(groups) + 0.3 * len(found))
  figure = Figure(figsize=size, layout='constrained')
  grid = figure.subplots(len(groups), len(columns), sharey='row', squeeze=False, height_ratios=heights)
  for axes, rows in zip(grid, groups.values(), strict=True):
    for axis, column in zip(axes, columns, strict=True):
      _draw_rows(axis, column, rows)
  for axis, column in zip(grid[-1], columns, strict=True):
    axis.set_xlabel(textwrap.fill(column.title, 20))
  marks = _marks(grid.flat)
  figure.legend(marks.values(), marks, loc='outside upper right', ncols=2)
  return figure


def _marks(axes) -> dict[str, Any]:
  """{label: line} of the legend that some panels share."""
  return {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}


def _draw_rows(axis, column: tables.Column, rows: Sequence[tuple[tables.Row, Sequence[Mapping]]]) -> None:
  """One panel: the published number or range of each row, and the mean of its seeds."""
  for place, (row, results) in enumerate(rows):
    if (said := row.published.get(column.metric)) is not None:
      ends = said if isinstance(said, tuple) else (said, said)
      axis.plot(ends, [place] * 2, color=COLORS[1], marker='s', markersize=7, markerfacecolor='none', label='paper')
    if values := column.values(results):
      mean, spread = _mean_and_spread(values)
      axis.errorbar(mean, place, xerr=spread, fmt='o', color=COLORS[0], capsize=3, label='here')
  axis.set(yticks=range(len(rows)), yticklabels=[row.title for row, _ in rows], ylim=(len(rows) - 0.5, -0.5))
  axis.margins(x=0.1)


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
  """Mean and standard deviation. That of one seed is NaN, which draws nothing."""
  return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


@style()
def simclr_and_dystress(sweep: tables.Sweep, results: tables.Results, *, metric: str, titles: Mapping[str, str]) -> Any:
  """SimCLR's accuracy against its constant temperature, next to DySTreSS's, in a panel for each data set.  -> Figure

  Args:
    titles: {prefix of the names of rows: title of a panel}. The rows are `simclr_TAU` and `cosine`, from 0.07 to 0.2.
  """
  from matplotlib.figure import Figure

  column = next(column for column in sweep.columns if column.metric == metric)
  simclr, dystress, paper = dict(color=COLORS[0]), dict(color=COLORS[1]), dict(linestyle=':')
  published = {row.name: row.published.get(metric) for row in sweep.rows}
  figure = Figure(figsize=(3.6 * len(titles), 3.4), layout='constrained')
  for axis, (prefix, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
    rows = tables.temperatures(results, f'{prefix}simclr_')
    points = [(tau, *_mean_and_spread(column.values(results[name]))) for tau, name in rows.items()]
    taus, means, spreads = zip(*points, strict=True) if points else ((), (), ())
    axis.errorbar(taus, means, spreads, marker='o', capsize=3, label='SimCLR, here', **simclr)
    axis.axhline(published[f'{prefix}simclr_0.2'], label='SimCLR, paper (τ not printed)', **simclr, **paper)
    span = (0.07, 0.2)
    if values := column.values(results.get(f'{prefix}cosine', ())):
      mean, spread = _mean_and_spread(values)
      axis.fill_between(span, mean - spread, mean + spread, alpha=0.3, linewidth=0, **dystress)
      axis.plot(span, [mean] * 2, linewidth=3, label='DySTreSS, here', **dystress)
    axis.plot(span, [np.mean(published[f'{prefix}cosine'])] * 2, label='DySTreSS, paper', **dystress, **paper)
    axis.set(title=title, xlabel='temperature τ', ylabel=column.title)
  marks = dict(sorted(_marks(figure.axes).items(), key=lambda mark: mark[0].startswith('DySTreSS')))
  figure.legend(marks.values(), marks, loc='outside upper center', ncols=4)
  return figure


class Panel(NamedTuple):
  """One heat map: values [rows, columns], with NaN for cells that were not run, and the labels of both axes."""

  title: str
  values: np.ndarray
  rows: tuple[str, Sequence]  # name of the axis, labels
  columns: tuple[str, Sequence]
  marked: tuple[int, int] | None = None  # (row, column) of a cell with a frame


@style()
def heat_maps(panels: Sequence[Panel], label: str, *, per_line: int, width: float, span: float = np.inf) -> Any:
  """Heat maps with one color scale, limited to `span` below the highest value.  -> Figure

  NaN cells (not run) are empty, and -inf cells (diverged) show a cross.
  """
  from matplotlib.figure import Figure
  from matplotlib.patches import Rectangle

  found = np.concatenate([panel.values[np.isfinite(panel.values)] for panel in panels])
  high = found.max() + 0.5 if len(found) else 1.0
  low = max(found.min() - 0.5, high - span) if len(found) else 0.0
  lines = -(-len(panels) // per_line)
  figure = Figure(figsize=(width, 0.5 + lines * width / per_line * 0.8), layout='constrained')
  axes = figure.subplots(lines, per_line, squeeze=False)
  for axis, panel in zip(axes.flat, panels, strict=True):
    image = axis.imshow(panel.values, origin='lower', cmap='viridis', vmin=low, vmax=high)
    for (row, column), value in np.ndenumerate(panel.values):
      if np.isfinite(value):
        color = 'white' if value < (low + high) / 2 else 'black'
        axis.text(column, row, f'{value:.1f}', ha='center', va='center', color=color, fontsize=9)
      elif np.isinf(value):
        axis.text(column, row, '×', ha='center', va='center', color=INK, fontsize=12)
    if panel.marked:
      row, column = panel.marked
      axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2.5))
    (down, row_names), (across, column_names) = panel.rows, panel.columns
    axis.set(title=panel.title, xlabel=across, xticks=range(len(column_names)), xticklabels=column_names)
    axis.set(ylabel=down, yticks=range(len(row_names)), yticklabels=row_names)
    axis.grid(False)
  if len(found):
    figure.colorbar(image, ax=axes, label=label)
  return figure
