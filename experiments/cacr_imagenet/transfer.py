"""CACR's Table 6: two encoders on the datasets of ELEVATER, with gains and the number of datasets that each wins.

  python main.py --mode=transfer --workdir=runs/moco_v3 ...
  python main.py --mode=transfer --workdir=runs/cacr ...
  python -m experiments.cacr_imagenet.transfer runs/moco_v3 runs/cacr

prints the table for the datasets on which both were evaluated. In parentheses: the gains of the paper's Table 6.
"""

import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from ssl_jax.evals.transfer import KINDS

# The paper's scores of MoCo v3 and CACR: fine-tuned, then with a linear classifier.
PUBLISHED = {
  'caltech101': ((73.7, 84.8), (80.8, 79.3)),
  'cifar10': ((70.3, 67.6), (78.5, 85.4)),
  'cifar100': ((17.4, 24.3), (60.5, 62.9)),
  'country211': ((2.3, 2.5), (4.8, 4.7)),
  'dtd': ((45.6, 51.2), (57.1, 57.1)),
  'eurosat': ((60.0, 73.6), (77.1, 76.1)),
  'fer2013': ((13.5, 23.0), (20.5, 18.3)),
  'fgvc_aircraft': ((7.2, 21.4), (11.8, 21.6)),
  'food101': ((27.6, 17.0), (36.6, 40.9)),
  'gtsrb': ((16.5, 23.7), (31.4, 32.9)),
  'hateful_memes': ((50.8, 51.8), (50.7, 50.9)),
  'kitti_distance': ((43.5, 45.4), (46.7, 50.3)),
  'mnist': ((18.1, 44.0), (64.1, 69.2)),
  'oxford_flowers102': ((65.7, 81.1), (79.5, 84.6)),
  'oxford_iiit_pet': ((77.1, 79.4), (76.2, 81.2)),
  'patch_camelyon': ((50.9, 58.4), (54.7, 56.9)),
  'rendered_sst2': ((50.7, 51.2), (50.0, 51.8)),
  'resisc45': ((58.2, 49.1), (61.1, 61.7)),
  'stanford_cars': ((11.2, 10.8), (13.4, 21.1)),
  'voc2007': ((25.7, 69.0), (47.9, 74.4)),
}


def table(first: Mapping, second: Mapping, names: Sequence[str]) -> str:
  """The scores of two transfer.json files side by side: one line per dataset, then the means and the wins."""
  common = [name for name in first['sets'] if name in second['sets']]
  if not common:
    raise ValueError(f'{names[0]} and {names[1]} have no set in common: run --mode=transfer on the same sets')
  for name in common:
    one, other = ({**run['sets'][name]['settings'], 'step': 0, 'init': ''} for run in (first, second))
    if one != other:
      raise ValueError(f'{name} was evaluated differently in {names[0]} and {names[1]}: run --mode=transfer again')
  gains = ' | '.join(f'{words}: {names[0]} | {names[1]} | gain (published)' for words in KINDS.values())
  lines = [f'| set | metric | {gains} |', '|---|---|' + '---|---|---|' * len(KINDS)]

  def add(name, metric, scores, published):
    """A line: for each kind, both scores and the gain, and the published gain if there is one."""
    cells = [f'{a:.1f} | {b:.1f} | {b - a:+.1f}' for a, b in scores]
    known = [f' ({b - a:+.1f})' for a, b in published] or [''] * len(cells)
    lines.append(f'| {name} | {metric} | {" | ".join(map("".join, zip(cells, known, strict=True)))} |')

  means = lambda rows: [tuple(map(statistics.fmean, zip(*column, strict=True))) for column in zip(*rows, strict=True)]
  scores = lambda name, kind: tuple(run['sets'][name][kind]['mean'] for run in (first, second))
  found = {name: [scores(name, kind) for kind in KINDS] for name in common}
  for name in common:
    add(name, first['sets'][name]['metric'], found[name], PUBLISHED.get(name, ()))
  in_paper = [PUBLISHED[name] for name in common if name in PUBLISHED]
  add('mean', '', means(found.values()), means(in_paper) if len(in_paper) == len(common) else ())
  wins = [(sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)) for pairs in zip(*found.values(), strict=True)]
  lines.append('| wins | | ' + ' | '.join(f'{a} | {b} | ' for a, b in wins) + '|')
  return '\n'.join(lines) + '\n'


def main(workdirs: Sequence[str]) -> str:
  if len(workdirs) != 2:
    raise ValueError('give two workdirs in which --mode=transfer was run')
  files = [pathlib.Path(workdir) / 'transfer.json' for workdir in workdirs]
  for file in files:
    if not file.is_file():
      raise ValueError(f'{file} is missing: run --mode=transfer there')
  first, second = (json.loads(file.read_text()) for file in files)
  return table(first, second, [pathlib.Path(workdir).name for workdir in workdirs])


if __name__ == '__main__':
  try:
    print(main(sys.argv[1:]), end='')
  except ValueError as error:
    sys.exit(f'transfer: {error}')
