"""What the benchmarks share: a peer whose result differs is named, not timed."""

import pytest

from benchmarks import determinism, timing
from configs import base
from ssl_jax import config


def test_a_peer_that_differs_is_named_and_the_others_are_timed(capsys):
  def same(ours, theirs):
    assert ours == theirs, f'{theirs} is not {ours}'

  table = timing.Table('A table', quick=True)
  table.compare(
    'sum', {'ours': lambda: 2, 'wrong': lambda: 3, 'right': lambda: 2, 'absent': 'not installed'}, same=same
  )
  rows = {line.split('|')[2].strip(): line for line in capsys.readouterr().out.splitlines() if '| sum' in line}
  assert 'differs: 3 is not 2' in rows['wrong'] and 'not installed' in rows['absent']
  assert '(' in rows['right'] and 'differs' not in rows['ours']


@pytest.mark.parametrize('quick', [True, False])
def test_the_runs_of_the_determinism_benchmark_are_valid(quick):
  for name, flags in determinism.cases(quick, networks=2).items():
    chosen = config.load('configs/quickstart.py', flags)
    config.validate(chosen, base.get_config())
    assert quick or f'deterministic={chosen.deterministic}' in name
