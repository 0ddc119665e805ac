"""Figures 1 and 5 to 8 of DySTreSS, drawn from the results so far.

  python -m experiments.dystress.figures

writes next to this file, if there are results: histograms.svg (Fig. 1, from the workdirs of the rows `untrained` and
`cosine` in runs/dystress); ranges.svg (Fig. 6), shifts.svg (Fig. 7) and learning_rates.svg (Fig. 8), each also for
CIFAR-100; and ranges_imagenet100.svg (Fig. 5). It also lists the missing rows. To use other workdirs for Figure 1:

  python -m experiments.dystress.figures BEFORE AFTER
"""

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from experiments import tables
from experiments.dystress import sweep
from experiments.dystress_imagenet import sweep as imagenet
from experiments.tables import Row
from ssl_jax.reporting.figures import COLORS, MARKS, draw_similarities, style, write_svg
from ssl_jax.workdir import metric_log

EXPERIMENTS = pathlib.Path(__file__).parent.parent
RUNS = pathlib.Path('runs/dystress')
TOLERANCE = 'backbone/same_label_similarity'
# Figures 6 to 8: {row: its label on the horizontal axis}, in order.
AXES = {
  'ranges': {f'cosine_{low}_{high}': f'{low}–{high}' for low, high in sweep.RANGES}
  | {'cosine': '0.07–0.2', 'simclr_0.2': '0.2–0.2'},
  'shifts': {'cosine': 'none'} | {f'shifted_{shift}': f'{shift:g}'.replace('-', '−') for shift, _ in sweep.SHIFTS},
  'learning_rates': dict(
    sorted(
      [('cosine', '0.06'), *((f'cosine_learning_rate_{rate}', f'{rate}') for rate in sweep.RATES)],
      key=lambda pair: float(pair[1]),
    )
  ),
}
LABELS = {'ranges': 'range of τ', 'shifts': 'shift of the minimum', 'learning_rates': 'learning rate'}


@style()
def histograms(workdirs: Mapping[str, pathlib.Path]) -> Figure:
  """Similarities of true positives, false negatives and true negatives, one panel per run (Fig. 1)."""
  figure = Figure(figsize=(3.4 * len(workdirs), 3.0), layout='constrained')
  axes = figure.subplots(1, len(workdirs), squeeze=False)[0]
  for axis, (title, workdir) in zip(axes, workdirs.items(), strict=True):
    draw_similarities(axis, metric_log.read_arrays(workdir))
    axis.set(title=title, xlim=(-1, 1), xlabel='cosine similarity')
  axes[0].set_ylabel('density')
  axes[0].legend(fontsize=7, loc='upper left')
  return figure


@style()
def along(results: tables.Results, names: Mapping[str, str], xlabel: str, accuracy: str) -> Figure:
  """Accuracy, uniformity and tolerance of some rows, in three panels (Fig. 6, 7 and 8)."""
  shown = {'accuracy, %': accuracy, '−uniformity': sweep.UNIFORMITY, 'tolerance': TOLERANCE}
  figure = Figure(figsize=(9.6, 3.0), layout='constrained')
  for axis, (ylabel, metric) in zip(figure.subplots(1, 3), shown.items(), strict=True):
    means = [statistics.mean(result['metrics'][metric] for result in results[name]) for name in names]
    means = [-value if metric == sweep.UNIFORMITY else value for value in means]
    axis.plot(list(names.values()), means, color=COLORS[0], marker=MARKS[0], linestyle='none')
    axis.tick_params(axis='x', labelrotation=45, labelsize=8)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.margins(x=0.1, y=0.2)
  return figure


def from_results(experiments: pathlib.Path = EXPERIMENTS) -> dict[str, Figure]:
  """{name: figure} of Figures 5 to 8. A figure needs at least two of its rows. Missing rows are printed."""
  here = tables.by_row(sweep.SWEEP, experiments / 'dystress')
  wanted: list[tuple[str, tables.Results, dict[str, str], str, str]] = []
  for ending, prefix in (('', ''), ('_cifar100', 'cifar100_')):
    for name, rows in AXES.items():
      prefixed = {prefix + row: title for row, title in rows.items()}
      wanted.append((name + ending, here, prefixed, LABELS[name], sweep.KNN))
  there = tables.by_row(imagenet.SWEEP, experiments / 'dystress_imagenet')
  ranges = {row.name: _range(row) for row in imagenet.SWEEP.of('Figure 5')}
  wanted.append(('ranges_imagenet100', there, ranges, LABELS['ranges'], imagenet.KNN))
  drawn = {}
  for name, results, rows, label, accuracy in wanted:
    run = {row: title for row, title in rows.items() if row in results}
    if lacking := [row for row in rows if row not in run]:
      print(f'{name}: not run yet: {", ".join(lacking)}')
    if len(run) > 1:
      drawn[name] = along(results, run, label, accuracy)
  return drawn


def _range(row: Row) -> str:
  return f'{row.changes.get("temperature.tau_min", 0.1)}–{row.changes.get("temperature.tau_max", 0.2)}'


def main(workdirs: Sequence[pathlib.Path] = (), out: pathlib.Path = EXPERIMENTS / 'dystress') -> list[pathlib.Path]:
  """Draws all figures that have results, and returns their files."""
  if len(workdirs) not in (0, 2):
    raise ValueError(f'{len(workdirs)} workdirs: give two, before and after training, or none')
  before, after = workdirs or (RUNS / 'untrained_seed0', RUNS / 'cosine_seed0')
  drawn = from_results()
  if lacking := [str(workdir) for workdir in (before, after) if not (workdir / 'evaluation.npz').exists()]:
    print(f'histograms: no evaluation.npz in {", ".join(lacking)}: run the sweep with --of="Figure 1"')
  else:
    drawn['histograms'] = histograms({'before training': before, 'after training': after})
  for name, figure in drawn.items():
    write_svg(figure, out / f'{name}.svg')
  return [out / f'{name}.svg' for name in drawn]


if __name__ == '__main__':
  try:
    print('\n'.join(map(str, main([pathlib.Path(argument) for argument in sys.argv[1:]]))))
  except ValueError as error:
    sys.exit(f'figures: {error}')
