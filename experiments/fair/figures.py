"""The results so far: the comparison in README.md, and surfaces.svg, the accuracies of all settings.

python -m experiments.fair.figures
"""

import math
import pathlib
import statistics

import numpy as np
from matplotlib.figure import Figure

from experiments import pictures, tables
from experiments.fair import sweep
from experiments.fair.sweep import FOLDER, LOSSES, METRIC, RATES, Finished
from ssl_jax.reporting.figures import write_svg

MARKS = ('<!-- comparison -->', '<!-- end of comparison -->')
NEAR = 1.0  # points below the best setting


def surface(loss: str, finished: Finished) -> np.ndarray:
  """Accuracy on the held-out images. Rows are learning rates, columns strengths.  -> [3, 3]

  NaN means not run, and -inf that the loss diverged.
  """
  found = sweep.accuracies(loss, finished)
  return np.array([[found.get((rate, value), np.nan) for value in LOSSES[loss].values] for rate in RATES])


def surfaces(finished: Finished) -> Figure:
  """A heat map for each loss, with one color scale of at most 15 points. A frame marks the chosen setting."""
  panels = []
  for name, loss in LOSSES.items():
    chosen = sweep.best(name, finished)
    marked = (RATES.index(chosen[0]), loss.values.index(chosen[1])) if chosen else None
    axes = (('learning rate', RATES), (loss.symbol, [f'{value:g}' for value in loss.values]))
    panels.append(pictures.Panel(loss.title, surface(name, finished), *axes, marked))
  return pictures.heat_maps(panels, 'kNN-200 on held-out images, %', per_line=4, width=10.0, span=15.0)


def comparison(finished: Finished) -> str:
  """A line per loss: its best setting, how easy it is to tune, and the final accuracies; '—' means not known yet."""
  head = ['loss', 'settings run', 'best setting', 'at the edge', 'kNN-200, held out, %', 'within 1 point']
  lines = [[*head, 'middle setting, held out, %', 'kNN-200, test, %', 'linear, test, %', 'seeds']]
  lines.append(['---'] * len(lines[0]))
  for name, loss in LOSSES.items():
    found, chosen = sweep.accuracies(name, finished), sweep.best(name, finished)
    diverged = sum(map(math.isinf, found.values()))
    count = f'{len(found)} of 9' + (f', {diverged} diverged' if diverged else '')
    cells = [loss.title, count, '—', '—', '—', '—']
    if chosen:
      near = sum(accuracy >= found[chosen] - NEAR for accuracy in found.values())
      at = ' and '.join(sweep.edges(name, chosen)) or 'no'
      cells[2:] = [loss.describe(*chosen), at, f'{found[chosen]:.2f}', f'{near} of 9']
    middle = found.get(sweep.grid(name)[0], math.nan)
    cells.append(f'{middle:.2f}' if math.isfinite(middle) else '—')
    finals = [result for (row, _), result in sorted(finished.items()) if row == f'final_{name}']
    lines.append([*cells, *(_mean(finals, metric) for metric in (METRIC, 'linear')), str(len(finals))])
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _mean(results: list, metric: str) -> str:
  values = [result['metrics'][metric] for result in results]
  spread = f' ± {statistics.stdev(values):.2f}' if len(values) > 1 else ''
  return f'{statistics.mean(values):.2f}{spread}' if values else '—'


def main(folder: pathlib.Path = FOLDER) -> None:
  """Writes both tables and the figure from the results, which also determine the final rows."""
  finished = tables.done(sweep.make(sweep.read(folder)), folder)
  tables.insert(folder / 'README.md', tables.markdown(sweep.make(finished), finished, FOLDER.name), tables.MARKS)
  tables.insert(folder / 'README.md', comparison(finished), MARKS)
  write_svg(surfaces(finished), folder / 'surfaces.svg')


if __name__ == '__main__':
  main()
