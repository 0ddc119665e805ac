"""CACR's Table 6: two encoders on the datasets of ELEVATER, with gains and the number of datasets that each wins.

  python main.py --mode=transfer --workdir=runs/moco_v3 ...
  python main.py --mode=transfer --workdir=runs/cacr ...
  python -m experiments.cacr_imagenet.transfer runs/moco_v3 runs/cacr

prints the table for the datasets on which both were evaluated.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from ssl_jax.evals.transfer import KINDS


def table(first: Mapping, second: Mapping, names: Sequence[str]) -> str:
  """The scores of two transfer.json files side by side: one line per dataset, then the means and the wins."""
  common = [name for name in first['sets'] if name in second['sets']]
  if not common:
    raise ValueError(f'{names[0]} and {names[1]} have no set in common: run --mode=transfer on the same sets')
  for name in common:
    one, other = ({**run['sets'][name]['settings'], 'step': 0, 'init': ''} for run in (first, second))
    if one != other:
      raise ValueError(f'{name} was evaluated differently in {names[0]} and {names[1]}: run --mode=transfer again')
  lines = [
    '| set | metric | ' + ' | '.join(f'{words}: {names[0]} | {names[1]} | gain' for words in KINDS.values()) + ' |',
    '|---|---|' + '---|---|---|' * len(KINDS),
  ]
  score = lambda run, name, kind: run['sets'][name][kind]['mean']
  pairs = {kind: [(score(first, name, kind), score(second, name, kind)) for name in common] for kind in KINDS}
  for place, name in enumerate(common):
    cells = [f'{a:.1f} | {b:.1f} | {b - a:+.1f}' for a, b in (pairs[kind][place] for kind in KINDS)]
    lines.append(f'| {name} | {first["sets"][name]["metric"]} | {" | ".join(cells)} |')
  means = [[sum(column) / len(common) for column in zip(*pairs[kind], strict=True)] for kind in KINDS]
  lines.append('| mean | | ' + ' | '.join(f'{a:.1f} | {b:.1f} | {b - a:+.1f}' for a, b in means) + ' |')
  wins = [(sum(a > b for a, b in pairs[kind]), sum(b > a for a, b in pairs[kind])) for kind in KINDS]
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
