"""The rows of CACR: each table has all of its cells, and Table 6 compares two encoders."""

import json
import statistics

import numpy as np
import pytest

from experiments.cacr.sweep import SWEEP as SMALL
from experiments.cacr_imagenet import transfer
from experiments.cacr_imagenet.sweep import SWEEP as LARGE
from ssl_jax import config
from ssl_jax.evals.transfer import ELEVATER


def test_tables_have_all_of_their_cells():
  """Sets × methods of each table of small images; ablations share the rows of other tables at the chosen values."""
  of = lambda item, sweep=SMALL: [row for row in sweep.rows if item in row.shows]
  counts = {
    'Table 3': 4 * 3 + 2 * 3,
    'Table 8': 6 * 3,
    'Table 9': 6 * 3,
    'Table 10': 4,
    'Table 11': 4 * 3,
    'Table 20': 4 * 3,
  }
  for item, count in counts.items():
    assert len(of(item)) == count, item
  assert len(of('Table 13')) == 6 * 2 * 3 and len(of('Table 12')) == 6 * 3
  assert len(of('Figure 8')) == 5 * 6 * 3 and len(of('Figure 10')) == 6 * 3
  assert {row.name for row in of('Figure 9')} >= {f'cacr_k{k}' for k in (1, 2, 4, 6, 8, 10)}
  assert len([row for row in of('Figure 3') if 'projector/conditional_entropy' in row.history]) == 12
  large = {'Table 4': 10, 'Table 5': 9, 'Table 6': 2, 'Table 7': 9, 'Table 15': 12, 'Table 16': 29, 'Table 18': 20}
  large['Figure 9'] = 4
  for item, count in large.items():
    assert len(of(item, LARGE)) == count, item


def test_table_9_blurs_as_much_as_a_kernel_of_three_pixels():
  """The code of Robinson et al. 2021 cuts Gaussians with a sigma of 0.1 to 2 pixels to three pixels."""
  side = np.exp(-0.5 / np.linspace(0.1, 2, 1000) ** 2)
  std = np.sqrt(2 * side / (1 + 2 * side))
  for row in SMALL.of('Table 9'):
    low, high = config.load(row.config, SMALL.overrides(row, 0)).augment.blur_sigma
    assert high == pytest.approx(std.max(), abs=0.01)
    assert (low + high) / 2 == pytest.approx(std.mean(), abs=0.02)


def test_published_scores_of_table_6():
  """All sets, with the means that the paper prints."""
  assert list(transfer.PUBLISHED) == list(ELEVATER)
  columns = zip(*((*tuned, *linear) for tuned, linear in transfer.PUBLISHED.values()), strict=True)
  assert [round(statistics.fmean(column), 1) for column in columns] == [39.3, 46.5, 50.2, 54.1]


def test_table_6_compares_two_encoders(tmp_path):
  for name, shift in (('one', 0.0), ('two', 5.0)):
    (tmp_path / name).mkdir()
    entry = lambda k, s=shift: {
      'metric': 'accuracy',
      'settings': {'seeds': [0], 'step': int(s), 'init': ''},
      'linear': {'mean': 50.0 + k * s},
      'finetune': {'mean': 40.0 - s},
    }
    sets = {'cifar10': entry(1), 'mnist': entry(0), 'dtd': entry(-2)}
    (tmp_path / name / 'transfer.json').write_text(json.dumps({'sets': sets}))
  lines = transfer.main([str(tmp_path / 'one'), str(tmp_path / 'two')]).splitlines()
  assert lines[2] == '| cifar10 | accuracy | 40.0 | 35.0 | -5.0 (-2.7) | 50.0 | 55.0 | +5.0 (+6.9) |'
  assert lines[5] == '| mean |  | 40.0 | 35.0 | -5.0 (+9.6) | 50.0 | 48.3 | -1.7 (+4.0) |'
  assert [cell.strip() for cell in lines[6].split('|')[3:9]] == ['3', '0', '', '1', '1', '']
  with pytest.raises(ValueError, match=r'transfer\.json is missing: run --mode=transfer there'):
    transfer.main([str(tmp_path / 'one'), str(tmp_path)])
