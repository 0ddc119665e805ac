"""The rows of CACR's tables train: two steps of each kind, with width, image size and batch reduced by flags."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from experiments.cacr.sweep import SWEEP as SMALL
from experiments.cacr_imagenet import transfer
from experiments.cacr_imagenet.sweep import SWEEP as LARGE
from ssl_jax import config, methods
from ssl_jax.data.views import image_views
from ssl_jax.run import optimizers
from ssl_jax.run.state import State
from ssl_jax.run.update import make_update

RESNET = ['model.width=2', 'model.stage_sizes=(1,1)']
VIT = ['model.width=16', 'model.depth=1', 'model.heads=2', 'model.patch=4']
DEPTHS = {'simsiam': 3, 'moco_v3_vit': 3, 'alexnet': 1, 'barlow_twins': 3}  # of projectors; others have 2 layers
BATCH = 8


def smaller(sweep, row):
  """The config of a row with flags that reduce width, image size and batch."""
  chosen = config.load(row.config, sweep.overrides(row, 0))
  name, method = chosen.model.name, chosen.method
  flags = [f'batch_size={BATCH}', 'dtype=float32', 'small_crops.size=8', 'parallel.processes=1', 'data.stored_size=0']
  flags.append(f'data.image_size={24 if name == "alexnet_small" else 16}')
  flags += VIT if name.startswith('vit') else RESNET if name.startswith('resnet') else []
  depth = len(chosen.projector.get('features', ())) or DEPTHS.get(chosen.projector.name, 2)
  flags.append(f'projector.features={(16,) * depth}')
  if method.get('queue'):  # as many batches as before, at most 6
    flags.append(f'method.queue={BATCH * min(method.queue // chosen.batch_size, 6)}')
  flags += ['method.predictor.features=(16,16)'] if method.name in ('moco_v3', 'byol', 'simsiam') else []
  flags += ['method.predictor.number=8'] if method.name == 'swav' else []
  return config.load(row.config, [*sweep.overrides(row, 0), *flags])


def kind(sweep, row):
  """What distinguishes the programs of rows, apart from the encoder: not data, epochs, or values of parameters."""
  chosen = config.load(row.config, sweep.overrides(row, 0))
  flags = [chosen.method.get(key, False) for key in ('by_view_pair', 'symmetric', 'intra_batch', 'keys_together')]
  more = [chosen.small_crops.number > 0, chosen.loss.get('cost'), chosen.optimizer.fixed_predictor, *flags]
  return json.dumps([chosen.method.name, chosen.loss.name, chosen.temperature.name, *more])


@functools.cache
def kinds():
  """{name: (sweep, row)} with every kind, and every encoder, of which the small AlexNet is slow to compile."""
  rows = [(sweep, row) for sweep in (SMALL, LARGE) for row in sweep.rows]
  encoder = lambda pair: config.load(pair[1].config, pair[0].overrides(pair[1], 0)).model.name
  found = {}
  for pair in sorted(rows, key=lambda pair: encoder(pair) == 'alexnet_small'):
    found.setdefault(kind(*pair), pair)
    found.setdefault(encoder(pair), pair)
  return {row.name: (sweep, row) for sweep, row in found.values()}


@pytest.mark.slow
@pytest.mark.parametrize('name', kinds())
def test_each_kind_of_row_takes_two_steps(name):
  chosen = smaller(*kinds()[name])
  config.validate(chosen, base.get_config())
  clock = dict(steps_per_epoch=4, total_steps=4 * chosen.epochs)
  method = methods.create(chosen, examples=4 * BATCH, **clock)
  size = chosen.data.image_size
  images = np.random.default_rng(0).integers(256, size=(4 * BATCH, size, size, 3), dtype=np.uint8)
  params, stats, extra = jax.jit(method.init)(jax.random.key(0), jnp.zeros((2, size, size, 3)))
  rate = optimizers.learning_rate(chosen.optimizer, batch_size=BATCH, **clock)
  optimizer = optimizers.create(chosen.optimizer, rate, optimizers.peak_learning_rate(chosen.optimizer, BATCH))
  state = State(jnp.int32(0), params, stats, extra, jax.jit(optimizer.init)(params))
  update = jax.jit(make_update(method, optimizer, rate, image_views(chosen, on_device=True).training, seed=0))
  for step in range(2):
    index = np.arange(step * BATCH, (step + 1) * BATCH)
    state, metrics = update(state, images[index], jnp.asarray(index))
    assert np.isfinite(metrics['loss'])
  assert int(state.step) == 2
  assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


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
  large = {'Table 4': 10, 'Table 5': 9, 'Table 15': 12, 'Table 16': 29, 'Table 18': 20, 'Figure 9': 4}
  for item, count in large.items():
    assert len(of(item, LARGE)) == count, item


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
  assert lines[2] == '| cifar10 | accuracy | 40.0 | 35.0 | -5.0 | 50.0 | 55.0 | +5.0 |'
  assert lines[5] == '| mean | | 40.0 | 35.0 | -5.0 | 50.0 | 48.3 | -1.7 |'
  assert [cell.strip() for cell in lines[6].split('|')[3:9]] == ['3', '0', '', '1', '1', '']
  with pytest.raises(ValueError, match=r'transfer\.json is missing: run --mode=transfer there'):
    transfer.main([str(tmp_path / 'one'), str(tmp_path)])
