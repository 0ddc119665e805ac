"""Writes compare.html and compare.md for several runs, from the files of their workdirs.

The only numbers computed here are statistics over seeds, and of differences between runs with the same seed.
"""

import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from ssl_jax.evals.scoring import mean_and_spread
from ssl_jax.reporting import figures, page
from ssl_jax.reporting.page import Figure, Number, Part, Section, Table
from ssl_jax.reporting.report import CHECKSUMS, MEASURES, UNIFORMITY_TOLERANCE, FinishedRun, with_unit
from ssl_jax.workdir.files import writable

# Config keys that change the definition of the loss, which makes loss values incomparable.
OF_LOSS = ('loss.', 'temperature.', 'method.', 'batch_size', 'views')
# Config keys that change the test images or their features, which makes accuracies incomparable.
OF_TEST = (
  *('data.name', 'data.file', 'data.contents', 'data.sizes', 'data.classes', 'data.test_split', 'data.held_out'),
  'eval.data.',
  *(f'eval.{key}' for key in ('features', 'vote', 'temperature', 'crop', 'flip', 'patch', 'train_images')),
)
# {prefix of accuracies: config keys that make only these accuracies incomparable}.
OF_KIND = {
  'linear': ('eval.linear', 'eval.seeds'),
  'finetune': ('eval.finetune', 'eval.finetune_learning_rate', 'eval.class_weights', 'eval.seeds'),
  'zero_shot': ('eval.prompts', 'eval.class_names'),
  'image_to_text': ('eval.retrieval',),
  'text_to_image': ('eval.retrieval',),
}
AVERAGED = ('spearman', 'transfer')  # names of accuracies on several sets, with their mean under NAME_mean
# {section with checksums of images: config keys that explain why they differ}.
EXPLAINED = {
  'data': (
    *('data.source', 'data.name', 'data.file', 'data.train_split', 'data.held_out', 'data.classes', 'data.columns'),
    'imbalance.',
  ),
  'eval.data': OF_TEST,
}
MOST_KEYS = 3  # in a label; if more keys differ, the label is only the folder


def compare(workdirs: Sequence[str | pathlib.Path], out: str | pathlib.Path) -> pathlib.Path:
  """Writes compare.html, compare.md and figures/ into `out`: mean ± standard deviation over seeds, per config."""
  if len(workdirs) < 2:
    raise ValueError(f'compare needs at least two workdirs, got {list(map(str, workdirs))}: add runs')
  runs = [FinishedRun.read(workdir) for workdir in workdirs]
  groups, differing = _groups(runs), _differing(runs)
  count = sum(len(runs) for runs in groups.values())
  many = any(len(runs) > 1 for runs in groups.values())
  lead = f'{count} runs of {len(groups)} config{"s" * (len(groups) > 1)}.'
  lead += ' ± is one standard deviation over seeds.' if many else ''
  for run in (run for runs in groups.values() for run in runs if run.since):
    lead += f' {run.workdir} was evaluated at step {run.evaluation["step"]:,}{run.since}.'
  for run in (run for run in runs if run.rows and not run.summary and not run.since):
    steps = [run.evaluation['step']] if 'step' in run.evaluation else run.measured
    at = f': its accuracies are those of step {" and ".join(f"{step:,}" for step in steps)}' if steps else ''
    lead += f' {run.workdir} is not finished{at}.'
  sections = [_accuracy(groups, differing), *_paired(groups, differing), *_over_epochs(groups, differing)]
  sections += [*_measures(groups), *_differences(differing, runs)]
  return page.write(writable(out), 'compare', 'Comparison of runs', lead, sections)


def _differing(runs: Sequence[FinishedRun]) -> dict[str, list]:
  """{key: its value in each run} for the keys that differ; runs without a config (features from a file) have None."""
  # An empty value means the same as a missing key in an older run.
  configs = [{k: v for k, v in run.settings.items() if k != 'seed' and v != ''} if run.config else {} for run in runs]
  distinct = lambda key: {json.dumps(config.get(key)) for config in configs if config}
  keys = [key for key in sorted(set().union(*configs)) if len(distinct(key)) > 1]
  # Another split has other images of the same data. Runs without checkpoints and older evaluations have no checksums.
  checksums = {f'{section}.{key}': section for section in EXPLAINED for key in CHECKSUMS}
  others = [key for key in keys if key not in checksums]
  explained = {section for section, causes in EXPLAINED.items() if any(key.startswith(causes) for key in others)}
  unknown = {key for key in checksums if not all(key in config for config in configs if config)}
  keys = [key for key in keys if key not in unknown and checksums.get(key) not in explained]
  return {key: [config.get(key) for config in configs] for key in keys}


def _groups(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
  """{label: runs with the same config, except for the seed}. A label has the keys that differ, and the folder."""
  differing, folders = _differing(runs), _folders([run.workdir for run in runs])

  def grouped(keys: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
      name = json.dumps([differing[key][i] for key in keys]) if run.config else str(run.workdir)
      found.setdefault(name, []).append(i)
    return list(found.values())

  def same(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    pairs = [(i, j) for group in groups for i, j in itertools.combinations(group, 2)]
    return [(i, j) for i, j in pairs if runs[i].config.get('seed') == runs[j].config.get('seed')]

  # Runs that were evaluated with different k still belong together, because kNN metrics are named after k. So do
  # forks of several seeds at the same step, although each has a different parent: the settings have its config.
  keys = [key for key in differing if key not in ('eval.k', 'fork')]
  if same(groups := grouped(keys)):
    groups = grouped(keys := list(differing))
  for i, j in same(groups):
    a, b = runs[i], runs[j]
    raise ValueError(f'{a.workdir} and {b.workdir} are the same run (seed {a.config.get("seed")}): give one')
  labels = {}
  for group in groups:
    values = {key: differing[key][group[0]] for key in keys if differing[key][group[0]] is not None}
    words = ', '.join(f'{_short_key(key, keys)} = {value}' for key, value in values.items())
    folder = folders[group[0]] if len(group) == 1 else f'{folders[group[0]]}, … {len(group)} seeds'
    labels[f'{words} ({folder})' if 0 < len(values) <= MOST_KEYS else folder] = [runs[i] for i in group]
  return labels


def _short_key(key: str, keys: Sequence[str]) -> str:
  """A key without its section, if that is unambiguous.

  >>> _short_key('temperature.tau', ['temperature.tau']), _short_key('loss.name', ['loss.name'])
  ('tau', 'loss')
  """

  def shorten(key: str) -> str:
    section, _, last = key.rpartition('.')
    return key if section.split('.')[0] in ('', 'data', 'eval', 'parent') else section if last == 'name' else last

  short = shorten(key)
  return short if [shorten(other) for other in keys].count(short) == 1 else key


def _folders(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """The names of folders, with as many parents as needed to make them unique.

  >>> _folders([pathlib.Path('runs/a/seed0'), pathlib.Path('runs/b/seed0')])
  ['a/seed0', 'b/seed0']
  """
  parts = [workdir.absolute().parts for workdir in workdirs]
  for depth in range(1, max(map(len, parts)) + 1):
    names = ['/'.join(part[-depth:]) for part in parts]
    if len(set(names)) == len(names):
      break
  return names


def _accuracy(groups: Mapping[str, Sequence[FinishedRun]], differing: Collection[str] = ()) -> Section:
  """A table of the accuracies, and a figure of one of them."""
  other = _of_other_sets(groups)
  keys, cells = _spread(groups, lambda run: {k: x for k, x in run.accuracies.items() if k not in other}, '.2f')
  having = lambda key: sum(key in found for found in cells.values())
  keys.sort(key=having, reverse=True)  # keys that most groups have come first
  for key in keys:
    if _comparable(key, differing):
      _mark_best(key, cells)
  rows = [
    [name, ', '.join(str(run.config.get('seed', '–')) for run in runs), *(cells[name].get(key, '–') for key in keys)]
    for name, runs in groups.items()
  ]
  parts: list[Part] = [Table(['run', 'seeds', *map(with_unit, keys)], rows)]
  if keys:
    # The key that most groups have; among equals, the mean correlation or else the first key.
    most = max(keys, key=lambda key: (having(key), key == 'spearman_mean'))
    values = {name: (found[most].value, found[most].spread) for name, found in cells.items() if most in found}
    parts.append(Figure('accuracy', f'{most}.', figures.dots(values, with_unit(most))))
  return Section('Accuracy', _about_accuracies(groups, keys, having, differing), parts)


def _measures(groups: Mapping[str, Sequence[FinishedRun]]) -> list[Section]:
  """A table of the measures of each layer, and a figure of two of them."""
  sections = []
  measures = lambda run: run.evaluation.get('measures', {})
  both = ('uniformity', 'same_label_similarity')
  for space in sorted(set().union(*(measures(run) for runs in groups.values() for run in runs))):
    pick = lambda run, space=space: measures(run).get(space, {})
    keys, cells = _spread(groups, pick, '.4f', f'measures.{space}.')
    rows = [[MEASURES[key][0], *(cells[name].get(key, '–') for name in groups)] for key in MEASURES if key in keys]
    parts: list[Part] = [Table(['', *groups], rows)]
    points = {name: [c[key].value for key in both] for name, c in cells.items() if all(key in c for key in both)}
    if points:
      drawn = figures.uniformity_tolerance(points)
      parts.append(Figure(f'uniformity_tolerance_{space}', UNIFORMITY_TOLERANCE, drawn))
    sections.append(Section(f'Measures of the {space} features', '', parts))
  return sections


def _spread(
  groups: Mapping[str, Sequence[FinishedRun]],
  pick: Callable[[FinishedRun], Mapping[str, float]],
  form: str,
  prefix: str = '',
) -> tuple[list[str], dict[str, dict[str, Number]]]:
  """(the keys of any run, {group: {key: mean and spread}} for the keys that all runs of the group have)."""
  keys = list(dict.fromkeys(key for runs in groups.values() for run in runs for key in pick(run)))
  cells: dict[str, dict[str, Number]] = {}
  for name, runs in groups.items():
    shared = [key for key in keys if all(key in pick(run) for run in runs)]
    found = {key: mean_and_spread([pick(run)[key] for run in runs]) for key in shared}
    cells[name] = {key: Number(prefix + key, mean, form, std) for key, (mean, std) in found.items()}
  return keys, cells


def _comparable(key: str, differing: Collection[str]) -> bool:
  """Whether an accuracy has the same meaning in runs whose settings differ in these keys."""
  settings = [name for kind, names in OF_KIND.items() if key.startswith(kind) for name in names]
  return not any(name.startswith(OF_TEST) or name in settings for name in differing)


def _of_other_sets(groups: Mapping[str, Sequence[FinishedRun]]) -> list[str]:
  """The means over sets that are not the same ones in all runs, such as spearman_mean."""
  found = [run.accuracies for runs in groups.values() for run in runs]
  sets = lambda kind: {tuple(sorted(key for key in x if key.startswith(f'{kind}_'))) for x in found}
  return [f'{kind}_mean' for kind in AVERAGED if len(sets(kind) - {()}) > 1]


def _paired(groups: Mapping[str, Sequence[FinishedRun]], differing: Collection[str] = ()) -> list[Section]:
  """Differences in accuracy from the first config, between runs with the same seed, with standard errors."""
  by_seed = lambda runs: {run.config['seed']: run for run in runs if 'seed' in run.config}
  (first, reference), *others = ((name, by_seed(runs)) for name, runs in groups.items())
  found = {name: [(reference[seed], run) for seed, run in runs.items() if seed in reference] for name, runs in others}
  found = {name: pairs for name, pairs in found.items() if pairs}
  keys = dict.fromkeys(key for pairs in found.values() for _, run in pairs for key in run.accuracies)
  other = _of_other_sets(groups)
  keys = [key for key in keys if _comparable(key, differing) and key not in other]
  rows: list[list[str | Number]] = []
  for name, pairs in found.items():
    shared = 'seed and start' if all(_same_start(a, b) for a, b in pairs) else 'seed'
    row: list[str | Number] = [name, ', '.join(str(run.config['seed']) for _, run in pairs), shared]
    for key in keys:
      both = [(a.accuracies, b.accuracies) for a, b in pairs]
      known = all(key in a and key in b for a, b in both)
      row.append(_difference(key, [b[key] - a[key] for a, b in both]) if known else '–')
    rows.append(row)
  if not rows or not keys:
    return []
  text = (
    f'Accuracies minus those of {first}, of runs with the same seed. ± is the standard error of the mean difference; '
    'one pair has none. Runs that share their start are forks of one run, or a fork and its parent.'
  )
  return [Section('Paired differences', text, [Table(['run', 'seeds', 'shared', *map(with_unit, keys)], rows)])]


def _difference(key: str, values: Sequence[float]) -> Number:
  """The mean difference, with its standard error.

  >>> str(_difference('knn5', [0.5, 1.0, 1.5]))
  '+1.00 ± 0.29'
  """
  mean, spread = mean_and_spread(values)
  return Number(f'difference.{key}', mean, '+.2f', None if spread is None else spread / math.sqrt(len(values)))


def _same_start(a: FinishedRun, b: FinishedRun) -> bool:
  """Whether two runs have the same losses up to the step of a fork: the fork has copied the rows of its parent."""
  losses = lambda run, step: [(row['step'], row['loss']) for row in run.rows if 'loss' in row and row['step'] <= step]
  forks = {row['step'] for run in (a, b) for row in run.rows if 'forked_at' in row}
  return any(losses(a, step) and losses(a, step) == losses(b, step) for step in forks)


def _mark_best(key: str, cells: Mapping[str, dict[str, Number]]) -> None:
  """Marks the highest mean, unless all are equal."""
  values = [found[key].value for found in cells.values() if key in found]
  if len(set(values)) < 2:
    return
  for found in cells.values():
    if key in found and found[key].value == max(values):
      found[key] = found[key]._replace(best=True)


def _about_accuracies(
  groups: Mapping[str, Sequence[FinishedRun]],
  keys: Sequence[str],
  having: Callable[[str], int],
  differing: Collection[str],
) -> str:
  """How to read the table."""
  tests = [key for key in differing if key.startswith(OF_TEST)]
  if not keys:
    return 'No run has been evaluated.'
  if tests:
    text = f'The accuracies are not comparable: {_differ(tests)}.'
  elif len(groups) > 1:
    text = '★ marks the highest mean.'
    for kind, names in OF_KIND.items():
      settings = [key for key in differing if key in names]
      if settings and any(key.startswith(kind) for key in keys):
        text += f' {kind} is not comparable: {_differ(settings)}.'
    if any(len(runs) == 1 for runs in groups.values()):
      text += ' With one seed, a small difference may be chance.'
  else:
    text = ''
  for key in _of_other_sets(groups):
    text += f' {key} is left out, because the runs were evaluated on different sets.'
  if some := [key for key in keys if having(key) < len(groups)]:
    text += f' Not all runs have {", ".join(some)}.'
    neighbors = sorted({int(key[3:]) for key in keys if re.fullmatch(r'knn\d+', key)})
    if neighbors and any(key.startswith('knn') for key in some):
      choice = str(tuple(neighbors)).replace(' ', '')
      text += f' To add it: python main.py --mode=evaluate --workdir=RUN "--config.eval.k={choice}".'
  return text.strip()


def _differ(keys: Sequence[str]) -> str:
  """'a differs', or 'a, b differ'."""
  return f'{", ".join(keys)} differ{"s" * (len(keys) == 1)}'


def _over_epochs(groups: Mapping[str, Sequence[FinishedRun]], differing: Collection[str]) -> list[Section]:
  """Accuracies and losses of all runs during training."""
  logged = {name: runs for name, runs in groups.items() if any(run.rows for run in runs)}

  def chart(ylabel: str, key: str) -> figures.Chart:
    curves = []
    for place, (name, runs) in enumerate(groups.items()):
      for run in runs:
        if points := figures.over_epochs(run.rows, key):
          detail = f'seed {run.config.get("seed")}' if len(runs) > 1 else ''
          curves.append(figures.Curve(name, points, detail, place))
    return figures.Chart(ylabel, curves)

  names = [{key for run in runs for row in run.rows for key in row} for runs in logged.values()]
  found = figures.accuracies([row for runs in logged.values() for run in runs for row in run.rows])
  found += ['spearman_mean'] * any('spearman_mean' in keys for keys in names)
  shared = [key for key in found if all(key in keys for keys in names)] or found
  parts: list[Part] = [
    Figure(f'{key}_epochs', f'{with_unit(key)}, during training.', chart(with_unit(key), key)) for key in shared
  ]
  text = ''
  if any('loss' in keys for keys in names):
    other = [key for key in differing if key.startswith(OF_LOSS)]
    caption = 'Loss, averaged over the steps between two logged rows.'
    if other:
      caption += ' Not comparable between these runs.'
      text = f'The losses are not comparable: {_differ(other)}, which changes the loss itself.'
    parts.append(Figure('losses', caption, chart('loss', 'loss')))
  return [Section('Training', text, parts)] if parts else []


def _differences(differing: Mapping[str, Sequence], runs: Sequence[FinishedRun]) -> list[Section]:
  """A table of the keys that differ, with a column per run."""
  if not differing:
    return []
  show = lambda value: '–' if value is None else value if isinstance(value, str) else json.dumps(value)
  rows = [[key, *map(show, values)] for key, values in differing.items()]
  return [Section('Keys that differ', '', [Table(['', *_folders([run.workdir for run in runs])], rows)])]
