"""Gradient caching: the gradient of the whole batch, batch norm per part, in the memory of one part."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax import methods, train
from ssl_jax.data import embedded
from ssl_jax.methods import Inputs
from ssl_jax.run import builder
from ssl_jax.run.devices import AXIS, Devices
from tests.helpers import final, tiny
from tests.methods.test_state import trace
from tests.test_image_text import small

BATCH, SIZE = 16, 12
# (method, its settings): what is negative, how many views, which networks take part.
LINEAR = {
  'simclr': dict(tau=dict(name='learnable')),
  'three_views': dict(name='simclr', views=3),
  'cmc': {},
  'moco': dict(queue=16, momentum=0.7, symmetric=True),
  'moco_v3': {},
  'fnc': dict(loss='fnc', queue=16),
  'memory_bank': {},
  'isogclr': dict(loss='robust_contrastive', tau=None),
  'redundancy': dict(loss='barlow_twins', tau=None),
  'byol': dict(loss='byol', tau=None),
  'simsiam': dict(loss='simsiam', tau=None),
  'dino': dict(loss='dino'),
  'swav': dict(loss='swav', small=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'devices', 'parts'), [*itertools.product(LINEAR, [1], [4]), ('simclr', 2, 2)])
def test_the_training_of_the_whole_batch_without_batch_norm(name, devices, parts):
  settings = {'name': name, **LINEAR[name]}
  settings['tau'] = settings.get('tau', 0.3)
  expected, losses = _trace(**settings, devices=1)
  states, values = _trace(**settings, devices=devices, microbatches=parts)
  np.testing.assert_allclose(values, losses, rtol=1e-5)
  chex.assert_trees_all_close(states[-1], expected[-1], rtol=1e-4, atol=1e-5)


def _trace(name, tau, **settings):
  return trace.__wrapped__(name, tau=tau, **settings)  # not cached: a temperature may be a dict


def built(config, microbatches, devices=1):
  """The method and a state of a config, and views of one batch."""
  run = builder.build(config)
  method = dataclasses.replace(run.method, microbatches=microbatches, axis_name=AXIS)
  views = np.random.default_rng(0).normal(size=(2, BATCH, SIZE, SIZE, 3)).astype(np.float32)
  return method, run.initial_state(), [*views], Devices.choose('pmap', devices)


def gradient(method, state, views, devices):
  """(loss, gradients, running statistics) of a step on some devices."""

  def step(state, *views):
    inputs = Inputs(views, jnp.arange(len(views[0])), state.step, jax.random.key(0))
    loss = lambda params: method.loss(params, state.batch_stats, state.extra, inputs)
    (value, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return *jax.lax.pmean((value, gradients), AXIS), outputs.batch_stats

  mapped = devices.map(step, replicated=1, sharded=2)
  return devices.unreplicate(mapped(devices.replicate(state), *devices.shard(views)))


class Loop(methods.METHODS['simclr']):
  """Encodes one part after the other, in the plainest way; the parts are those of the whole batch."""

  def encode(self, network, batch_stats, views, predict=True, apart=False):
    parts = []
    for k in range(self.microbatches):
      x = jnp.concatenate([view[k :: self.microbatches] for view in views])
      variables = {'params': network, 'batch_stats': batch_stats}
      outputs, changed = self.network.apply(variables, x, train=True, mutable=['batch_stats'])
      parts.append((jnp.split(outputs['projector'], len(views)), changed['batch_stats']))
    found = []
    for v, view in enumerate(views):
      z = jnp.zeros((len(view), parts[0][0][v].shape[1]))
      for k, (outputs, _) in enumerate(parts):
        z = z.at[k :: self.microbatches].set(outputs[v])
      found.append({'projector': z})
    return found, jax.tree.map(lambda *x: sum(x) / len(x), *(stats for _, stats in parts))


def distance(found, expected):
  """The largest difference of two trees, where the largest entry of each array is 1; some arrays are all rounding."""
  least = 1e-3 * max(np.abs(x).max() for x in jax.tree.leaves(expected))
  apart = lambda a, b: np.abs(a - b).max() / max(np.abs(b).max(), least)
  return max(jax.tree.leaves(jax.tree.map(apart, found, expected)))


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2])
def test_batch_norm_is_over_each_part(devices, tmp_path):
  method, state, views, chosen = built(tiny(tmp_path, temperature=dict(name='learnable')), 4, devices)
  assert state.batch_stats, 'there is batch norm'
  loop = Loop(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})
  expected = gradient(loop, state, views, Devices.choose('pmap', 1))
  found = gradient(method, state, views, chosen)
  assert distance(found, expected) < 1e-4
  assert distance(gradient(dataclasses.replace(method, microbatches=1), state, views, chosen), expected) > 0.1


@pytest.mark.slow
def test_both_towers_of_images_and_text(monkeypatch):
  monkeypatch.setattr(embedded, 'SIZES', {'train': 64, 'test': 32})
  run = builder.build(small('siglip', model=dict(name='vit_tiny32', width=24, depth=1)))
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 100, (BATCH, 18)).astype(np.uint32)  # and two words of the dropout key
  given = run.initial_state(), [rng.normal(size=(BATCH, 32, 32, 3)).astype(np.float32), tokens]
  chosen = (dataclasses.replace(run.method, microbatches=parts) for parts in (1, 4))
  expected, found = (gradient(method, *given, Devices.choose('pmap', 2))[:2] for method in chosen)
  assert np.abs(expected[1]['network']['text']['projector']['fc1']['kernel']).max() > 0
  assert distance(found, expected) < 1e-4


@pytest.mark.slow
def test_gradients_are_summed_in_float32(tmp_path):
  plain = dict(name='vit_tiny32', width=24, depth=1, patch=4)
  config = tiny(tmp_path, model=plain, projector=dict(name='simclr', features=(8, 8), batch_norm='none'))
  config.dtype = 'bfloat16'
  found, expected = (gradient(*built(config, parts))[1] for parts in (8, 1))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
  vector = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
  a, b = vector(found), vector(expected)
  assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


@pytest.mark.slow
def test_the_memory_is_that_of_one_part():
  from configs import cifar10

  config = cifar10.get_config('model.width=16,dtype=float32,batch_size=64')
  method = methods.create(config, steps_per_epoch=1, total_steps=1)
  params, batch_stats, extra = jax.eval_shape(method.init, jax.random.key(0), jnp.zeros((2, 32, 32, 3)))
  view = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)

  def planned(parts):
    chosen = dataclasses.replace(method, microbatches=parts)

    def loss(params, batch_stats, views):
      inputs = Inputs(views, jnp.arange(64), jnp.zeros((), jnp.int32), jax.random.key(0))
      return chosen.loss(params, batch_stats, extra, inputs)[0]

    compiled = jax.jit(jax.grad(loss)).lower(params, batch_stats, (view, view)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert planned(8) < 0.3 * planned(1)


@pytest.mark.slow
def test_the_same_curve_on_any_devices(tmp_path):
  runs = {}
  for devices, kind in ((1, 'pmap'), (2, 'pmap'), (4, 'shard_map')):
    parallel = {'parallel.devices': devices, 'parallel.map': kind}
    chosen = tiny(tmp_path, **{'method.microbatches': 4, 'steps': 6, 'eval.k': ()}, **parallel)
    train.train(chosen, tmp_path / str(devices))
    runs[devices] = final(tmp_path / str(devices), chosen)
  for devices in (2, 4):
    np.testing.assert_allclose(runs[devices][0], runs[1][0], rtol=1e-5)
    chex.assert_trees_all_close(runs[devices][1].batch_stats, runs[1][1].batch_stats, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'method.microbatches': 3}, 'method.microbatches = 3 must divide the 32 examples of a batch: try 2'),
    (
      {'method.microbatches': 16, 'parallel.devices': 4},
      'method.microbatches = 16 must divide the 8 examples of a batch on each of the 4 devices: try 8',
    ),
    ({'method.microbatches': 0}, 'method.microbatches = 0 must be a whole number of at least 1'),
    ({'method.microbatches': 2.5}, 'method.microbatches = 2.5 must be a whole number'),
    ({'method.microbatches': 'two'}, "method.microbatches = 'two' must be a whole number of at least 1"),
  ],
)
def test_what_does_not_divide_a_batch_is_refused(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    builder.build(tiny(tmp_path, **changes))
  assert '\n' not in str(error.value)
