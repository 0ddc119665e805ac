"""Queue, bank, centre, momentum encoder and average against float64 loops, on any number of devices."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen as nn

from ssl_jax import losses, methods, pairs, temperature
from ssl_jax.data import pipeline
from ssl_jax.methods import Network, Plan
from ssl_jax.models import heads
from ssl_jax.run.devices import AXIS, Devices
from ssl_jax.run.state import State, average_of
from ssl_jax.run.update import make_update

pytestmark = pytest.mark.slow  # it compiles every method

BATCH, EXAMPLES, STEPS, RATE, D = 8, 24, 10, 0.5, 4
TAU = 0.3


class Color(nn.Module):
  """The mean color through a matrix: an encoder of any image size that a loop can follow."""

  @nn.compact
  def __call__(self, images, train: bool):
    return nn.Dense(5, use_bias=False, name='fc')(images.mean((1, 2)))


def linear(width):
  return heads.MLP(features=(width,), batch_norm='none', last_bias=False)


def build(
  name, loss='info_nce', parameters=(), tau=TAU, views=2, batch=BATCH, width=D, head=None, axis_name=AXIS, **fields
):
  kind = methods.METHODS[name]
  predictor = {'prototypes': heads.Prototypes(6), None: None}.get(kind.predictor, linear(width))
  function = kind.accepts[loss]
  return kind(
    network=Network(Color(), head or linear(width), predictor),
    contrast=losses.Loss(function, dict(parameters)) if kind.accepts is losses.CONTRASTIVE else function,
    temperature=temperature.from_config(tau),
    plan=Plan(batch_size=batch, examples=EXAMPLES, views=views, steps_per_epoch=EXAMPLES // batch, total_steps=STEPS),
    axis_name=axis_name,
    **fields,
  )


def batches(views, small=0):
  """(views, index) of each step: colors that the views of an image share, in part."""
  rng = np.random.default_rng(0)
  image = rng.normal(size=(EXAMPLES, 1, 1, 3))
  for step in range(STEPS):
    epoch, place = divmod(step, EXAMPLES // BATCH)
    index = pipeline.order(0, epoch, EXAMPLES)[place * BATCH : (place + 1) * BATCH].astype(np.int32)
    sizes = [4] * views + [2] * small
    yield tuple((image[index] + 0.5 * rng.normal(size=(BATCH, n, n, 3))).astype(np.float32) for n in sizes), index


def cropped(views):
  """As the host hands them to the update: groups of views of one size, here one each."""
  return tuple(view[:, None] for view in views)


@functools.cache
def trace(name, devices, kind='pmap', small=0, ema=0.0, **settings):
  """(the state before each step and after the last, the loss of each step); every replica is the same."""
  method = build(name, **dict(settings))
  chosen = Devices.choose(kind, devices)
  params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
  extra = {**extra, 'average': average_of(params, batch_stats)} if ema else extra
  optimizer = optax.sgd(RATE)
  views = method.plan.views
  given = [lambda key, view: view] * (views + small)
  update = make_update(method, optimizer, lambda step: RATE, given, seed=0, ema=ema, axis_name=AXIS)
  step = chosen.map(update, replicated=1, sharded=2)
  state = State(jnp.zeros((), jnp.int32), params, batch_stats, extra, optimizer.init(params))
  states, values, state = [jax.device_get(state)], [], chosen.replicate(state)
  for batch, index in batches(views, small):
    state, metrics = step(state, *chosen.shard((cropped(batch), index)))
    copies = [jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data), state) for i in range(devices)]
    for copy in copies[1:]:
      chex.assert_trees_all_equal(copy, copies[0])
    states.append(chosen.unreplicate(state))
    values.append(float(chosen.unreplicate(metrics)['loss']))
  return states, values


def matrices(network):
  """The float64 matrices of encoder and projector, and of the predictor where there is one."""
  named = (('encoder', 'fc'), ('projector', 'fc1'), ('predictor', 'fc1'))
  return [np.float64(network[part][layer]['kernel']) for part, layer in named if layer in network.get(part, {})]


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def project(weights, view):
  """The projection of a view, by the matrices of `matrices`."""
  return np.float64(view).mean(axis=(1, 2)) @ weights[0] @ weights[1]


def close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def slow_weights(states, momentum, final=None):
  """The momentum encoder's matrices of each step, by a loop."""
  slow = matrices(states[0].params['network'])[:2]
  for step in range(STEPS):
    m = momentum if final is None else final - (final - momentum) * (1 + np.cos(np.pi * step / STEPS)) / 2
    fast = matrices(states[step].params['network'])[:2]
    slow = [m * old + (1 - m) * new for old, new in zip(slow, fast, strict=True)]
    yield slow


DEVICES = pytest.mark.parametrize('devices', [1, 2, 4])


@DEVICES
@pytest.mark.parametrize('queue', [16, 24])
def test_queue_and_momentum_encoder_of_moco(devices, queue):
  states, _ = trace('moco', devices, queue=queue, momentum=0.7)
  ring, pointer, keys = np.float64(states[0].extra['queue']), 0, states[0].extra['keys']
  close(np.linalg.norm(ring, axis=1), np.ones(queue))
  for step, (views, slow) in enumerate(zip((v for v, _ in batches(2)), slow_weights(states, 0.7), strict=True)):
    for key in keys:  # those of the step before
      ring[pointer] = key
      pointer = (pointer + 1) % queue
    keys = unit(project(slow, views[1]))
    extra = states[step + 1].extra
    close(extra['queue'], ring)
    close(extra['keys'], keys)
    assert extra['pointer'] == pointer
    for found, expected in zip(matrices(extra['momentum']), slow, strict=True):
      close(found, expected)


@pytest.mark.parametrize('symmetric', [False, True])
def test_the_keys_of_the_last_large_view_enter_the_queue(symmetric):
  states, _ = trace('moco', 1, queue=16, momentum=0.7, views=3, small=1, symmetric=symmetric)
  for step, ((views, _), slow) in enumerate(zip(batches(3, small=1), slow_weights(states, 0.7), strict=True)):
    close(states[step + 1].extra['keys'], unit(project(slow, views[2])))


@pytest.mark.parametrize(('name', 'loss'), [('moco', 'info_nce'), ('fnc', 'fnc')])
def test_logged_similarities_and_temperatures_are_means_over_all_views(name, loss):
  tau = dict(name='monotonic_cosine', tau_min=0.05, tau_max=0.5)
  fields = dict(symmetric=True) if name == 'moco' else {}
  method = build(name, loss, tau=tau, views=3, axis_name=None, queue=2 * BATCH, **fields)
  views, index = next(batches(3, small=1))
  logged = []
  for order in ((0, 1, 2, 3), (2, 1, 0, 3)):  # a mean over all views does not depend on their order
    params, stats, extra = method.init(jax.random.key(0), views[0])
    inputs = methods.Inputs(tuple(views[v] for v in order), index, jnp.asarray(0), jax.random.key(0))
    metrics = method.loss(params, stats, extra, inputs)[1].metrics
    logged.append({key: metrics[key] for key in ('positive_similarity', 'temperature')})
  chex.assert_trees_all_close(*logged, rtol=1e-5)


@pytest.mark.parametrize('name', ['simclr', 'cmc', 'moco', 'moco_v3', 'memory_bank'])
def test_the_temperature_that_macl_sets_is_logged(name):
  fields = dict(queue=2 * BATCH) if name == 'moco' else {}
  parameters = dict(tau0=0.2, alpha=2.0, threshold=-0.5)
  method = build(name, 'macl', parameters, tau=dict(name='none'), axis_name=None, **fields)
  views, index = next(batches(2))
  params, stats, extra = method.init(jax.random.key(0), views[0])
  inputs = methods.Inputs(views, index, jnp.asarray(0), jax.random.key(0))
  metrics = method.loss(params, stats, extra, inputs)[1].metrics
  close(metrics['temperature'], 0.2 * (1 + 2.0 * (float(metrics['positive_similarity']) + 0.5)))


@pytest.mark.parametrize('name', ['swav', 'dino'])
def test_clustering_methods_log_their_temperatures(name):
  fields = dict(teacher_temperature=0.04) if name == 'dino' else {}
  method = build(name, name, axis_name=None, **fields)
  views, index = next(batches(2))
  params, stats, extra = method.init(jax.random.key(0), views[0])
  inputs = methods.Inputs(views, index, jnp.asarray(0), jax.random.key(0))
  metrics = method.loss(params, stats, extra, inputs)[1].metrics
  chex.assert_trees_all_close(dict(metrics), {'temperature': TAU, **fields})


@DEVICES
@pytest.mark.parametrize('negatives', [0, 7])
def test_the_memory_bank(devices, negatives):
  states, _ = trace('memory_bank', devices, momentum=0.5, negatives=negatives)
  bank = np.float64(states[0].extra['bank'])
  for step, (views, index) in enumerate(batches(2)):
    weights = matrices(states[step].params['network'])
    mean = np.mean([unit(project(weights, view)) for view in views], axis=0)
    for i, z in zip(index, mean, strict=True):
      bank[i] = unit(0.5 * bank[i] + 0.5 * z)
    close(states[step + 1].extra['bank'], bank)


def test_an_image_that_is_in_a_batch_twice_is_written_once():
  method = build('memory_bank', axis_name=None)
  params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
  (views, _), index = next(batches(2)), np.array([3, 3, 5, 7, 3, 9, 11, 13], np.int32)
  inputs = methods.Inputs(views, index, jnp.int32(0), jax.random.key(0))
  _, outputs = method.loss(params, batch_stats, extra, inputs)
  z = np.mean([unit(project(matrices(params['network']), view)) for view in views], axis=0)[0]
  close(outputs.extra['bank'][3], unit(0.5 * extra['bank'][3] + 0.5 * z))


def test_averages_and_temperatures_of_isogclr():
  settings = dict(tau=None, momentum=0.4, tau_momentum=0.3, tau_rate=0.05, tau_min=0.25, tau_max=0.7)
  states, values = trace('isogclr', 1, loss='robust_contrastive', tau_start=0.3, **settings)
  average, tau, slope = np.zeros(EXAMPLES), np.full(EXAMPLES, 0.3), np.zeros(EXAMPLES)
  for step, (views, index) in enumerate(batches(2)):
    weights = matrices(states[step].params['network'])
    z = [unit(project(weights, view)) for view in views]
    losses_of_images = []
    for b, i in enumerate(index):
      h = [
        z[v][b] @ z[w][other] - z[v][b] @ z[1 - v][b]
        for v, w, other in itertools.product(range(2), range(2), range(BATCH))
        if other != b
      ]
      exponentials = np.exp(np.array(h) / tau[i])
      average[i] = 0.4 * average[i] + 0.6 * exponentials.mean() if average[i] else exponentials.mean()
      losses_of_images.append(tau[i] * (np.log(average[i]) + 0.3))
      derivative = np.log(average[i]) + 0.3 - np.mean(h * exponentials) / tau[i] / average[i]
      slope[i] = 0.3 * slope[i] + 0.7 * derivative
      tau[i] = np.clip(tau[i] - 0.05 * slope[i], 0.25, 0.7)
    close(values[step], np.mean(losses_of_images))
    for name, expected in dict(average=average, tau=tau, slope=slope).items():
      close(states[step + 1].extra['images'][name], expected)
  assert tau.min() == 0.25 and len(np.unique(tau)) > EXAMPLES // 2, 'some are at the bound, others have their own'


def test_sampled_negatives_follow_from_the_key_of_the_step():
  method = build('memory_bank', negatives=7, axis_name=None)
  params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
  views, index = next(batches(2))
  inputs = lambda key: methods.Inputs(views, index, jnp.int32(0), jax.random.key(key))
  value = lambda key: method.loss(params, batch_stats, extra, inputs(key))[0]
  assert value(1) == value(1)
  assert abs(value(1) - value(2)) > 1e-3


def test_each_step_draws_negatives_of_its_own():
  method = build('memory_bank', negatives=7, axis_name=None)
  params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
  optimizer = optax.sgd(RATE)
  update = make_update(method, optimizer, lambda step: RATE, [lambda key, view: view] * 2, seed=0)
  state = lambda step: State(step, params, batch_stats, extra, optimizer.init(params))
  views, index = next(batches(2))
  value = jax.jit(lambda step: update(state(step), cropped(views), index)[1]['loss'])
  assert value(1) == value(1)
  assert abs(value(1) - value(2)) > 1e-3


@DEVICES
def test_centre_and_momentum_encoder_of_dino(devices):
  settings = dict(loss='dino', momentum=0.8, final_momentum=1.0, centre_momentum=0.6, teacher_temperature=0.1)
  states, values = trace('dino', devices, small=1, **settings)
  centre = np.zeros(D)
  for step, ((views, _), slow) in enumerate(zip(batches(2, small=1), slow_weights(states, 0.8, 1.0), strict=True)):
    student = [project(matrices(states[step].params['network']), view) for view in views]
    teacher = [project(slow, view) for view in views[:2]]
    softmax = lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    crossed = [
      -np.mean(np.sum(softmax((teacher[t] - centre) / 0.1) * np.log(softmax(student[s] / TAU)), axis=1))
      for t, s in itertools.product(range(2), range(3))
      if s != t
    ]
    np.testing.assert_allclose(values[step], np.mean(crossed), rtol=2e-4)
    centre = 0.6 * centre + 0.4 * np.concatenate(teacher).mean(axis=0)
    close(states[step + 1].extra['centre'], centre)
    for found, expected in zip(matrices(states[step + 1].extra['momentum']), slow, strict=True):
      close(found, expected)


@pytest.mark.parametrize(('step', 'expected'), [(3, 0.1), (9, 0.15)])
def test_the_teacher_temperature_of_dino_follows_its_schedule(step, expected):
  def value(teacher_temperature):
    method = build('dino', loss='dino', teacher_temperature=teacher_temperature, axis_name=None)
    params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
    inputs = methods.Inputs(*next(batches(2)), jnp.int32(step), jax.random.key(0))
    return jax.jit(method.loss)(params, batch_stats, extra, inputs)[0]

  schedule = dict(name='linear_schedule', start=0.05, end=0.15, epochs=2)
  np.testing.assert_allclose(value(schedule), value(expected), rtol=1e-5)


@pytest.mark.parametrize(
  ('name', 'part', 'head'),
  [('dino', 'projector', heads.DINOHead(features=(5, D), prototypes=6)), ('swav', 'predictor', None)],
)
def test_prototypes_are_frozen_at_first(name, part, head):
  states, _ = trace(name, 1, loss=name, freeze_epochs=2, head=head)
  steps = 2 * EXAMPLES // BATCH
  networks = [state.params['network'] for state in states]
  prototypes = [network[part].get('prototypes', network[part])['kernel'] for network in networks]
  moved = [(a != b).any() for a, b in itertools.pairwise(prototypes)]
  assert moved == [False] * steps + [True] * (STEPS - steps)
  assert all(
    (a['encoder']['fc']['kernel'] != b['encoder']['fc']['kernel']).any() for a, b in itertools.pairwise(networks)
  )


@DEVICES
def test_queue_of_swav(devices):
  states, _ = trace('swav', devices, loss='swav', queue=16, queue_epochs=0, small=1)
  ring, pointer, keys = np.float64(states[0].extra['queue']), 0, states[0].extra['keys']
  for step, (views, _) in enumerate(batches(2, small=1)):
    ring[:, pointer : pointer + BATCH] = keys
    pointer = (pointer + BATCH) % 16
    keys = [unit(project(matrices(states[step].params['network']), view)) for view in views[:2]]
    close(states[step + 1].extra['queue'], ring)
    close(states[step + 1].extra['keys'], keys)


def test_the_queue_of_swav_counts_once_it_is_full():
  _, without = trace('swav', 1, loss='swav', small=1)
  _, with_queue = trace('swav', 1, loss='swav', queue=16, queue_epochs=0, small=1)
  assert with_queue[:2] == without[:2]  # 16 images are two batches
  assert abs(with_queue[2] - without[2]) > 1e-5


@DEVICES
def test_the_average_of_the_weights(devices):
  states, _ = trace('simclr', devices, ema=0.8)
  average = matrices(states[0].params['network'])
  for step in range(STEPS):
    new = matrices(states[step + 1].params['network'])
    average = [0.8 * old + 0.2 * fast for old, fast in zip(average, new, strict=True)]
    for found, expected in zip(matrices(states[step + 1].evaluated[0]['network']), average, strict=True):
      close(found, expected)
  plain, _ = trace('simclr', devices)
  chex.assert_trees_all_equal(plain[-1].params, states[-1].params)
  chex.assert_trees_all_equal(plain[-1].evaluated[0], plain[-1].params)


KINDS = {
  'simclr': {},
  'simclr_by_view_pair': dict(loss='decoupled', by_view_pair=True, views=3, small=1),
  'cmc': dict(views=3, small=1),
  'moco': dict(queue=16, momentum=0.7, small=1),
  'moco_symmetric': dict(queue=16, momentum=0.7, symmetric=True, intra_batch=True, views=3),
  'moco_v3': dict(momentum=0.7, small=1),
  'moco_v3_together': dict(loss='cacr', tau=None, momentum=0.7, views=3, small=1, keys_together=True),
  'fnc': dict(loss='fnc', momentum=0.7, views=3, queue=16, top=4, threshold=0.9, small=1),
  'memory_bank': dict(negatives=7),
  # a loss with a mean over the queries of all devices
  'simclr_align_uniform': dict(loss='align_uniform', tau=None),
  'moco_align_uniform': dict(loss='align_uniform', tau=None, queue=16, momentum=0.7, symmetric=True),
  'moco_v3_align_uniform': dict(loss='align_uniform', tau=None, momentum=0.7),
  'memory_bank_align_uniform': dict(loss='align_uniform', tau=None, negatives=7),
  'isogclr': dict(loss='robust_contrastive', tau=None, views=3, tau_rate=0.05),
  'byol': dict(loss='byol', tau=None, momentum=0.7, small=1),
  'simsiam': dict(loss='simsiam', tau=None, small=1),
  'simsiam_mean': dict(loss='simsiam', tau=None, views=3, mean_target=True),
  'redundancy': dict(loss='vicreg', tau=None, views=3),
  'dino': dict(loss='dino', momentum=0.7, small=1),
  'swav': dict(loss='swav', queue=16, queue_epochs=0, small=1),
}


@pytest.mark.parametrize('name', KINDS)
@pytest.mark.parametrize(('kind', 'devices'), [('pmap', 2), ('shard_map', 4)])
def test_the_same_state_on_any_devices(name, kind, devices):
  method = max((known for known in methods.METHODS if name.startswith(known)), key=len)
  one, values = trace(method, 1, **KINDS[name])
  other, other_values = trace(method, devices, kind, **KINDS[name])
  np.testing.assert_allclose(other_values, values, rtol=1e-4, atol=1e-5)  # the loss of CACR crosses 0
  chex.assert_trees_all_close(other[-1], one[-1], rtol=1e-3, atol=1e-4)
  assert any(abs(values[0] - value) > 1e-3 for value in values), 'nothing was trained'


@pytest.mark.parametrize('name', ['simclr', 'moco_symmetric', 'memory_bank'])
def test_blocks_of_queries_train_the_same(name):
  method = name.removesuffix('_symmetric')
  whole, values = trace(method, 1, **KINDS[name])
  ring = [dict(ring=True)] if name == 'simclr' else []
  for devices, how in ((1, {}), *((4, how) for how in ({}, *ring))):
    other, other_values = trace(method, devices, block=3, **how, **KINDS[name])  # 3 divides no number of queries here
    np.testing.assert_allclose(other_values, values, rtol=1e-5)
    chex.assert_trees_all_close(other[-1], whole[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', ['simclr', 'moco_symmetric', 'memory_bank'])
def test_the_loss_sees_blocks(name, monkeypatch):
  asked, of_blocks = [], pairs.NegativeBlocks.stream
  monkeypatch.setattr(pairs.NegativeBlocks, 'stream', lambda blocks: asked.append(blocks.block) or of_blocks(blocks))
  trace(name.removesuffix('_symmetric'), 1, block=5, **KINDS[name])  # 5: traced nowhere else
  assert set(asked) == {5}


@pytest.mark.parametrize('apart', [False, True])
def test_views_are_one_batch_of_batch_norm_or_one_each(apart):
  norm = heads.MLP(features=(D,), batch_norm='all')
  method = build('simclr', head=norm, axis_name=None, views_apart=apart)
  views, index = next(batches(2))
  params, stats, extra = method.init(jax.random.key(0), views[0])
  inputs = methods.Inputs(views, index, jnp.int32(0), jax.random.key(0))
  loss, outputs = method.loss(params, stats, extra, inputs)
  z = [np.float64(view).mean(axis=(1, 2)) @ np.float64(params['network']['encoder']['fc']['kernel']) for view in views]
  (dense,) = (x for x in jax.tree.leaves(params['network']['projector']) if x.ndim == 2)
  z = [x @ np.float64(dense) for x in z]
  groups = z if apart else [np.concatenate(z)]
  normed = [(x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) for x in groups]
  z1, z2 = normed if apart else np.split(normed[0], 2)
  expected = losses.nt_xent(jnp.asarray(z1, jnp.float32), jnp.asarray(z2, jnp.float32), TAU).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  means = [x for path, x in jax.tree_util.tree_leaves_with_path(outputs.batch_stats) if 'mean' in str(path[-1])]
  running = np.zeros(D)
  for group in groups:
    running = 0.9 * running + 0.1 * group.mean(axis=0)
  np.testing.assert_allclose(means[0], running, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('similarity', ['dot', 'euclidean'])
def test_simclr_with_another_similarity_is_the_loss_of_its_pairs(similarity):
  states, values = trace('simclr', 2, similarity=similarity)
  views, _ = next(batches(2))
  weights = jax.tree.leaves(states[0].params['network'])
  z = [np.float64(view).mean(axis=(1, 2)) @ np.float64(weights[0]) @ np.float64(weights[1]) for view in views]
  each, losses_of_queries = np.concatenate(z), []
  s = each @ each.T if similarity == 'dot' else -np.linalg.norm(each[:, None] - each[None], axis=2)
  for q in range(2 * BATCH):
    positive = (q + BATCH) % (2 * BATCH)
    others = [k for k in range(2 * BATCH) if k not in (q, positive)]
    losses_of_queries.append(-s[q, positive] / TAU + np.log(np.exp(s[q, [positive, *others]] / TAU).sum()))
  np.testing.assert_allclose(values[0], np.mean(losses_of_queries), rtol=1e-5)


def test_pairs_of_views_have_the_similarity_too():
  states, values = trace('simclr', 1, loss='decoupled', by_view_pair=True, similarity='dot', views=3)
  views, _ = next(batches(3))
  weights = jax.tree.leaves(states[0].params['network'])
  z = [jnp.asarray(view.mean(axis=(1, 2)) @ weights[0] @ weights[1]) for view in views]
  pos, neg, where = pairs.by_view_pair(*z, similarity='dot')
  np.testing.assert_allclose(values[0], losses.decoupled(pos, neg, TAU, where=where).mean(), rtol=1e-5)


@pytest.mark.parametrize('name', ['align_uniform', 'cacr', 'triplet', 'hard_negative', 'macl'])
def test_losses_of_cosines_take_no_other_similarity(name):
  with pytest.raises(ValueError, match=f"method.similarity = 'dot' must be 'cosine' for the loss {name!r}"):
    build('simclr', loss=name, similarity='dot')


def torch_alg3(views, fast, slow, queue, t_pos=1.0, t_neg=2.0):
  """CACR, Alg. 3 with intra-batch negatives, line by line; the gradient with respect to `fast`."""
  fast = [torch.tensor(w, requires_grad=True) for w in fast]
  images = [torch.tensor(np.float64(view).mean(axis=(1, 2))) for view in views]
  normalize = functools.partial(torch.nn.functional.normalize, dim=1)
  q_list = [normalize(image @ fast[0] @ fast[1]) for image in images]
  k_list = [torch.tensor(unit(image.numpy() @ slow[0] @ slow[1])) for image in images]
  stacked_k, queue = torch.stack(k_list), torch.tensor(queue)
  positive, negative = 0.0, 0.0
  for k, q in enumerate(q_list):
    rest = [v for v in range(len(views)) if v != k]
    cost = (q - stacked_k[rest]).norm(p=2, dim=-1).pow(2).transpose(1, 0)
    weights = torch.softmax(cost.detach() * t_pos, dim=1)
    positive = positive + (cost * weights).sum(1).mean()
    apart = 2 - 2 * q @ queue.T
    others = (2 - 2 * q @ q.T)[~torch.eye(len(q), dtype=torch.bool)].view(len(q), len(q) - 1)
    apart = torch.cat([apart, others], dim=1)
    negative = negative + (-apart * torch.softmax(-t_neg * apart, dim=1)).sum(1).mean()
  loss = (positive + negative) / len(q_list)
  loss.backward()
  return loss.item(), [w.grad.numpy() for w in fast]


@DEVICES
def test_cacr_on_moco_is_algorithm_3(devices):
  settings = dict(
    loss='cacr',
    parameters=(('stop_positive_weights', True),),
    tau=None,
    queue=16,
    momentum=0.7,
    symmetric=True,
    intra_batch=True,
    views=3,
  )
  states, values = trace('moco', devices, **settings)
  for step, ((views, _), slow) in enumerate(zip(batches(3), slow_weights(states, 0.7), strict=True)):
    before, after = (matrices(states[s].params['network']) for s in (step, step + 1))
    expected, gradients = torch_alg3(views, before, slow, np.float64(states[step + 1].extra['queue']))
    np.testing.assert_allclose(values[step], expected, rtol=2e-4, atol=1e-5)
    for old, new, gradient in zip(before, after, gradients, strict=True):
      close((old - new) / RATE, gradient)


def check_step(states, values, step, loss):
  """The value is that of `loss`, a torch function of the matrices, and the step is down its gradient."""
  before, after = (matrices(states[s].params['network']) for s in (step, step + 1))
  weights = [torch.tensor(w, requires_grad=True) for w in before]
  expected = loss(weights)
  expected.backward()
  np.testing.assert_allclose(values[step], expected.item(), rtol=2e-4, atol=1e-5)
  for old, new, weight in zip(before, after, weights, strict=True):
    close((old - new) / RATE, weight.grad)


def torch_predict(weights, view):
  """The unit prediction of a view, by the matrices of `matrices`."""
  color = torch.tensor(np.float64(view).mean(axis=(1, 2)))
  return torch.nn.functional.normalize(color @ weights[0] @ weights[1] @ weights[2], dim=1)


def torch_repulsion(loss, x, y):
  """The term of the negatives of one pair of views, in which the negatives of x are the y of other images."""
  of_queries = []
  for i, query in enumerate(x):
    apart = torch.stack([(query - other).pow(2).sum() for j, other in enumerate(y) if j != i])
    weights = torch.softmax(-2 * apart, dim=0) if loss == 'cacr' else torch.full_like(apart, 1 / len(apart))
    of_queries.append((weights * torch.exp(-2 * apart)).sum())
  return torch.log(sum(of_queries) / len(of_queries))


@DEVICES
@pytest.mark.parametrize('loss', ['align_uniform', 'cacr'])
def test_the_logarithm_of_a_mean_is_taken_for_each_pair_of_views(loss, devices):
  """AU-CL, and CACR with the RBF cost (Eq. 13-14), as the CACR authors compute them with several views."""
  parameters = (('cost', 'rbf'),) if loss == 'cacr' else ()
  states, values = trace('simclr', devices, loss=loss, parameters=parameters, tau=None, by_view_pair=True, views=3)
  for step, (views, _) in enumerate(itertools.islice(batches(3), 4)):

    def value(weights, views=views):
      colors = [torch.tensor(np.float64(view).mean(axis=(1, 2))) for view in views]
      z = [torch.nn.functional.normalize(color @ weights[0] @ weights[1], dim=1) for color in colors]
      attraction = []
      for v, i in itertools.product(range(3), range(BATCH)):
        cost = torch.stack([(z[v][i] - z[w][i]).pow(2).sum() for w in range(3) if w != v])
        attraction.append((torch.softmax(cost, dim=0) * cost).sum() if loss == 'cacr' else cost.mean())
      repulsion = [torch_repulsion(loss, z[x], z[y]) for x, y in itertools.combinations(range(3), 2)]
      return sum(attraction) / len(attraction) + sum(repulsion) / len(repulsion)

    check_step(states, values, step, value)


@DEVICES
def test_moco_v3_is_its_loop(devices):
  states, values = trace('moco_v3', devices, momentum=0.7)
  for step, ((views, _), slow) in enumerate(zip(batches(2), slow_weights(states, 0.7, 1.0), strict=True)):
    keys = [torch.tensor(unit(project(slow, view))) for view in views]

    def loss(weights, views=views, keys=keys):
      logits = [torch_predict(weights, views[v]) @ keys[1 - v].T / TAU for v in range(2)]
      return sum(torch.nn.functional.cross_entropy(x, torch.arange(BATCH)) for x in logits) / 2

    check_step(states, values, step, loss)


@DEVICES
def test_cacr_on_moco_v3_is_its_loop(devices):
  """Each query of 3 large views and a small one has all its positives at once, and all keys of those views."""
  t_pos, t_neg, large = 1.5, 0.8, 3
  parameters = (('t_pos', t_pos), ('t_neg', t_neg), ('stop_positive_weights', True))
  settings = dict(loss='cacr', parameters=parameters, tau=None, momentum=0.7, views=large, small=1, keys_together=True)
  states, values = trace('moco_v3', devices, **settings)
  for step, ((views, _), slow) in enumerate(zip(batches(large, small=1), slow_weights(states, 0.7, 1.0), strict=True)):
    keys = [torch.tensor(unit(project(slow, view))) for view in views[:large]]

    def loss(weights, views=views, keys=keys):
      of_queries = []
      for v, view in enumerate(views):
        others = [w for w in range(large) if w != v]
        for i, query in enumerate(torch_predict(weights, view)):
          cost = torch.stack([(query - keys[w][i]).pow(2).sum() for w in others])
          far = torch.stack([(query - keys[w][j]).pow(2).sum() for w in others for j in range(BATCH) if j != i])
          attraction = (torch.softmax(t_pos * cost.detach(), dim=0) * cost).sum()
          of_queries.append(attraction - (torch.softmax(-t_neg * far, dim=0) * far).sum())
      return sum(of_queries) / len(of_queries)

    check_step(states, values, step, loss)


def test_with_two_views_keys_together_change_nothing():
  apart, values = trace('moco_v3', 1, momentum=0.7)
  together, same = trace('moco_v3', 1, momentum=0.7, keys_together=True)
  np.testing.assert_allclose(same, values, rtol=1e-6)
  chex.assert_trees_all_close(together[-1].params, apart[-1].params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', ['byol', 'simsiam'])
def test_byol_and_simsiam_are_their_loops(name):
  states, values = trace(name, 1, loss=name, tau=None, **({'momentum': 0.7} if name == 'byol' else {}))
  for step, ((views, _), slow) in enumerate(zip(batches(2), slow_weights(states, 0.7, 1.0), strict=True)):
    target = slow if name == 'byol' else matrices(states[step].params['network'])
    targets = [torch.tensor(unit(project(target, view))) for view in views]

    def loss(weights, views=views, targets=targets):
      cosine = sum((torch_predict(weights, views[v]) * targets[1 - v]).sum(dim=1).mean() for v in range(2)) / 2
      return 2 - 2 * cosine if name == 'byol' else -cosine

    check_step(states, values, step, loss)


@pytest.mark.parametrize('name', ['byol', 'simsiam'])
def test_the_mean_of_the_other_views_may_be_the_target(name):
  """FastSiam: with four views, a view predicts the mean of the three other projections, before it is normalized."""
  more = {'momentum': 0.7} if name == 'byol' else {}
  states, values = trace(name, 1, loss=name, tau=None, views=3, small=1, mean_target=True, **more)
  for step, ((views, _), slow) in enumerate(zip(batches(3, small=1), slow_weights(states, 0.7, 1.0), strict=True)):
    target = slow if name == 'byol' else matrices(states[step].params['network'])
    keys = [project(target, view) for view in views[:3]]  # the last view is a small crop, which is no target
    others = [[key for w, key in enumerate(keys) if w != v] for v in range(4)]
    targets = [torch.tensor(unit(sum(some) / len(some))) for some in others]

    def loss(weights, views=views, targets=targets):
      cosine = sum((torch_predict(weights, views[v]) * targets[v]).sum(dim=1).mean() for v in range(4)) / 4
      return 2 - 2 * cosine if name == 'byol' else -cosine

    check_step(states, values, step, loss)


@pytest.mark.parametrize('name', ['simclr', 'cmc', 'moco', 'moco_v3', 'memory_bank'])
def test_the_logged_temperature_is_the_mean_of_the_positives(name):
  low, high = 0.1, 0.9
  fields = dict(queue=16) if name == 'moco' else {}
  method = build(name, tau=dict(name='linear', tau_min=low, tau_max=high), axis_name=None, **fields)
  params, batch_stats, extra = method.init(jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
  views, index = next(batches(2))
  inputs = methods.Inputs(views, index, jnp.int32(0), jax.random.key(0))
  _, outputs = jax.jit(method.loss)(params, batch_stats, extra, inputs)
  weights = matrices(params['network'])
  keys = [unit(project(weights, view)) for view in views]
  queries = [unit(project(weights, view) @ weights[2]) for view in views] if name == 'moco_v3' else keys
  if name == 'memory_bank':
    keys = [extra['bank'][index]] * 2
  positives = np.concatenate([np.sum(queries[v] * keys[1 - v], axis=1) for v in range(2)])
  close(outputs.metrics['temperature'], np.mean(low + (high - low) * np.abs(positives)))


def test_the_queue_costs_what_the_arithmetic_says():
  """A queue of 65,536 x 128 is 32 MiB of state, updated in place, and the step makes no copy of it."""

  def memory(queue, batch=8, width=128):
    method = build('moco', queue=queue, momentum=0.999, batch=batch, width=width, axis_name=None)
    params, batch_stats, extra = jax.eval_shape(method.init, jax.random.key(0), jnp.zeros((2, 4, 4, 3)))
    optimizer = optax.sgd(RATE)
    update = make_update(method, optimizer, lambda step: RATE, [lambda key, view: view] * 2, seed=0)
    opt_state = jax.eval_shape(optimizer.init, params)
    state = State(jax.ShapeDtypeStruct((), jnp.int32), params, batch_stats, extra, opt_state)
    views, index = jax.ShapeDtypeStruct((batch, 2, 4, 4, 3), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    return jax.jit(update, donate_argnums=0).lower(state, (views,), index).compile().memory_analysis()

  small, large = memory(1024), memory(65536)
  queue, logits = (65536 - 1024) * 128 * 4, (65536 - 1024) * 8 * 4
  assert large.argument_size_in_bytes - small.argument_size_in_bytes == queue
  assert large.output_size_in_bytes - small.output_size_in_bytes == queue
  assert large.alias_size_in_bytes - small.alias_size_in_bytes == queue
  # Beside the state: the similarities [b, M] and their gradient, of 2 MiB each.
  assert 0 < large.temp_size_in_bytes - small.temp_size_in_bytes <= 3 * logits < queue / 4
