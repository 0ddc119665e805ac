"""A paper's table as a figure: published numbers beside ours. A sweep's `--table` draws it."""

import pathlib
import statistics
import textwrap
from collections.abc import Mapping

from experiments import tables
from ssl_jax.reporting.figures import COLOURS, style, svg


def draw(sweep: tables.Sweep, folder: pathlib.Path) -> None:
  """Writes results.svg if a row with a published number was run."""
  finished = tables.done(sweep, folder)
  if tables.comparable(sweep, finished):
    (folder / 'results.svg').write_text(svg(_published_and_here(sweep, finished), paper='white'))


@style()
def _published_and_here(sweep: tables.Sweep, finished: Mapping):
  """One panel per column with published numbers, one line per row that was run; whiskers: one standard deviation."""
  from matplotlib.figure import Figure

  columns, rows = tables.comparable(sweep, finished)
  figure = Figure(figsize=(2.8 + 2.0 * len(columns), 1.0 + 0.3 * len(rows)), layout='constrained')
  axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
  titles = [row.title for row, _ in rows]
  for axis, column in zip(axes, columns, strict=True):
    for place, (row, results) in enumerate(rows):
      if (said := row.published.get(column.metric)) is not None:
        ends = said if isinstance(said, tuple) else (said, said)
        axis.plot(ends, [place] * 2, color=COLOURS[1], marker='s', markersize=7, markerfacecolor='none', label='paper')
      if values := column.values(results):
        spread = statistics.stdev(values) if len(values) > 1 else None
        axis.errorbar(statistics.mean(values), place, xerr=spread, fmt='o', color=COLOURS[0], capsize=3, label='here')
    axis.set(yticks=range(len(rows)), yticklabels=titles, ylim=(len(rows) - 0.5, -0.5))
    axis.set_xlabel(textwrap.fill(column.title, 24))
    axis.margins(x=0.1)
  marks = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
  figure.legend(marks.values(), marks, loc='outside upper right', ncols=2)
  return figure
