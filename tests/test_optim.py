"""Optimizers match torch and hand-written updates; learning rates match their formulas."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from configs import base
from ssl_jax.models.vit import ViT
from ssl_jax.run import builder, optimizers
from tests.helpers import tiny


def section(**changes):
  optimizer = base.get_config().optimizer
  with optimizer.unlocked():
    optimizer.update(changes)
  return optimizer


def quadratic(params):
  return sum(
    jnp.sum((p - 0.3) ** 2 * (1.0 + jnp.arange(p.size, dtype=p.dtype).reshape(p.shape))) for p in params.values()
  )


def weights():
  rng = np.random.default_rng(0)
  return {'kernel': rng.normal(size=(3, 4)).astype(np.float32), 'bias': rng.normal(size=4).astype(np.float32)}


def train(optimizer, params, steps, loss=quadratic):
  @jax.jit
  def step(params, state):
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.asarray, params)
  state = optimizer.init(params)
  for _ in range(steps):
    params, state = step(params, state)
  return params


def gradient_of_quadratic(w):
  return 2 * (w - 0.3) * (1 + np.arange(w.size).reshape(w.shape))


def torch_trains(create, rates, params=None):
  """`train` with torch's optimizer, one step at each learning rate."""
  found = {name: torch.tensor(x, requires_grad=True) for name, x in (params or weights()).items()}
  optimizer = create(found.values(), lr=1.0)
  for rate in rates:
    optimizer.param_groups[0]['lr'] = rate
    optimizer.zero_grad()
    sum(((p - 0.3) ** 2 * (1 + torch.arange(p.numel()).reshape(p.shape))).sum() for p in found.values()).backward()
    optimizer.step()
  return {name: x.detach().numpy() for name, x in found.items()}


def test_sgd_matches_torch():
  rates = [0.01, 0.02, 0.005, 0.001, 0.0]
  schedule = lambda step: jnp.asarray(rates)[step]
  ours = train(optimizers.create(section(momentum=0.8, weight_decay=5e-4), schedule), weights(), len(rates))
  theirs = torch_trains(functools.partial(torch.optim.SGD, momentum=0.8, weight_decay=5e-4), rates)
  chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize('exempt', [True, False])
def test_lars_matches_a_slow_loop(exempt):
  rate, momentum, decay, trust = 4.0, 0.8, 1e-2, 0.001
  optimizer = section(name='lars', momentum=momentum, weight_decay=decay, exempt=exempt)
  ours = train(optimizers.create(optimizer, lambda _: rate), weights(), 5)
  expected = {k: v.astype(np.float64) for k, v in weights().items()}
  velocity = {k: np.zeros_like(v) for k, v in expected.items()}
  for _ in range(5):
    grads = {k: gradient_of_quadratic(v) for k, v in expected.items()}
    for name, g in grads.items():
      w, local = expected[name], 1.0
      if name == 'kernel' or not exempt:
        g = g + decay * w
        local = trust * np.linalg.norm(w) / np.linalg.norm(g)
      velocity[name] = momentum * velocity[name] - rate * local * g
      expected[name] = w + velocity[name]
  chex.assert_trees_all_close(ours, jax.tree.map(np.float32, expected), rtol=2e-5, atol=1e-6)


def test_adamw_matches_torch():
  chosen = section(name='adamw', betas=(0.8, 0.95), weight_decay=0.1)
  ours = train(optimizers.create(chosen, lambda _: 0.02), weights(), 5)
  theirs = torch_trains(functools.partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1), [0.02] * 5)
  chex.assert_trees_all_close(ours, theirs, rtol=1e-4)


def test_adamw_exempts_biases():
  zero_gradient = {'kernel': np.full((2, 2), 1.0, np.float32), 'bias': np.full(2, 1.0, np.float32)}
  optimizer = optimizers.create(section(name='adamw', weight_decay=0.1, exempt=True), lambda _: 0.5)
  grads = jax.tree.map(np.zeros_like, zero_gradient)
  updates, _ = optimizer.update(grads, optimizer.init(zero_gradient), zero_gradient)
  np.testing.assert_allclose(updates['kernel'], -0.05, rtol=1e-6)
  np.testing.assert_array_equal(updates['bias'], 0.0)


def kernels():
  """Dense kernels, two of them of one shape, and a convolution."""
  rng, shapes = np.random.default_rng(0), {'a': (3, 4), 'b': (3, 4), 'tall': (6, 2), 'convolution': (2, 1, 3, 4)}
  return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def orthogonalized(x):
  """Five steps of Muon's polynomial, in float64."""
  x = x / np.linalg.norm(x)
  for _ in range(5):
    x = 3.4445 * x - 4.775 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
  return x


def test_muon_matches_a_slow_loop():
  rate, momentum, decay = 0.1, 0.8, 0.2
  ours = train(
    optimizers.create(section(name='muon', momentum=momentum, weight_decay=decay), lambda _: rate), kernels(), 4
  )
  expected = {k: v.astype(np.float64) for k, v in kernels().items()}
  average = {k: np.zeros_like(v) for k, v in expected.items()}
  for step in range(1, 5):
    for name, w in expected.items():
      g = gradient_of_quadratic(w)
      average[name] = momentum * average[name] + (1 - momentum) * g
      ahead = momentum * average[name] / (1 - momentum ** (step + 1)) + (1 - momentum) * g / (1 - momentum**step)
      matrix = ahead.reshape(-1, w.shape[-1])
      direction = 0.2 * math.sqrt(max(matrix.shape)) * orthogonalized(matrix).reshape(w.shape)
      expected[name] = w - rate * (direction + decay * w)
  chex.assert_trees_all_close(ours, jax.tree.map(np.float32, expected), rtol=1e-4, atol=1e-5)


def test_muon_matches_torch():
  """Without momentum, whose average torch starts differently. torch multiplies in bfloat16."""
  params = {name: x for name, x in kernels().items() if x.ndim == 2}
  chosen = dict(momentum=0.0, weight_decay=0.2, adjust_lr_fn='match_rms_adamw')
  theirs = torch_trains(functools.partial(torch.optim.Muon, **chosen), [0.1], params)
  ours = train(optimizers.create(section(name='muon', momentum=0.0, weight_decay=0.2), lambda _: 0.1), params, 1)
  moved = lambda found: {name: np.asarray(x) - params[name] for name, x in found.items()}
  chex.assert_trees_all_close(moved(ours), moved(theirs), rtol=0.05, atol=2e-3)


def test_muon_leaves_the_rest_to_adamw():
  table = {'embedding': np.arange(6, dtype=np.float32).reshape(3, 2)}
  params = {'network': weights(), 'words': table, 'temperature': {'log': np.ones((2, 2), np.float32)}}
  loss = lambda params: sum(quadratic(part) for part in params.values())
  by = {
    name: train(optimizers.create(section(name=name), lambda _: 0.02), params, 3, loss) for name in ('muon', 'adamw')
  }
  others = lambda found: (found['network']['bias'], found['words'], found['temperature'])
  chex.assert_trees_all_close(others(by['muon']), others(by['adamw']), rtol=1e-6)
  assert np.abs(by['muon']['network']['kernel'] - by['adamw']['network']['kernel']).max() > 1e-3


def moved_by_decay(optimizer, params):
  """Whether each parameter moves although its gradient is zero."""
  update = lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]
  return jax.tree.map(lambda x: bool(np.any(x)), jax.jit(update)(params))


NAMES = pytest.mark.parametrize('name', ['sgd', 'lars', 'adamw', 'muon'])
EXEMPT = pytest.mark.parametrize('exempt', [True, False])


@NAMES
@EXEMPT
def test_biases_are_exempt_on_request(name, exempt):
  optimizer = optimizers.create(section(name=name, weight_decay=0.1, exempt=exempt), lambda _: 0.5)
  assert moved_by_decay(optimizer, weights()) == {'kernel': True, 'bias': not exempt}


@functools.cache
def weights_of_a_vit():
  model = ViT(patch=4, width=8, depth=1, heads=2)
  shapes = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8, 8, 3)), train=False), jax.random.key(0))
  return {'network': {'encoder': jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes['params'])}}


@NAMES
@EXEMPT
def test_the_frozen_patch_projection_of_a_vit_is_never_decayed(name, exempt):
  params = weights_of_a_vit()
  optimizer = optimizers.create(section(name=name, weight_decay=0.1, exempt=exempt), lambda _: 0.5)
  moved = moved_by_decay(optimizer, params)['network']['encoder']
  assert moved['patch_embed'] == {'kernel': False, 'bias': False}
  assert moved['blocks_0']['qkv'] == {'kernel': True, 'bias': not exempt}


def test_a_learned_temperature_is_never_decayed():
  params = {'network': {'kernel': np.ones((2, 2), np.float32)}, 'temperature': {'log': np.ones((), np.float32)}}
  optimizer = optimizers.create(section(momentum=0.0, weight_decay=0.5), lambda _: 1.0)
  grads = jax.tree.map(np.zeros_like, params)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  np.testing.assert_allclose(updates['network']['kernel'], -0.5)
  np.testing.assert_array_equal(updates['temperature']['log'], 0.0)


@pytest.mark.parametrize(('scaling', 'factor'), [('none', 1.0), ('linear', 2.0), ('sqrt', math.sqrt(512))])
def test_learning_rate_scales_with_the_batch(scaling, factor):
  assert optimizers.peak_learning_rate(section(learning_rate=0.075, scaling=scaling), 512) == pytest.approx(
    0.075 * factor
  )


def test_cosine_after_warm_up():
  rate = optimizers.learning_rate(
    section(warmup_epochs=2.0, learning_rate=1.0), batch_size=8, steps_per_epoch=5, total_steps=50
  )
  expected = [s / 10 if s < 10 else 0.5 * (1 + math.cos(math.pi * (s - 10) / 40)) for s in range(51)]
  np.testing.assert_allclose([rate(s) for s in range(51)], expected, atol=1e-6)


@pytest.mark.parametrize('name', ['sgd', 'adamw'])
def test_gradients_are_clipped_before_the_optimizer(name):
  clipped = optimizers.create(section(name=name, clip=1.0), lambda step: 0.1)
  plain = optimizers.create(section(name=name), lambda step: 0.1)
  params, long = {'w': jnp.ones((3, 2))}, {'w': jnp.full((3, 2), 5.0)}

  @functools.partial(jax.jit, static_argnums=0)
  def step(optimizer, grads):
    return optimizer.update(grads, optimizer.init(params), params)[0]['w']

  np.testing.assert_allclose(step(clipped, long), step(plain, {'w': long['w'] / jnp.linalg.norm(long['w'])}), rtol=1e-5)
  short = {'w': jnp.full((3, 2), 0.1)}
  np.testing.assert_allclose(step(clipped, short), step(plain, short), rtol=1e-6)


def test_linear_after_warm_up():
  optimizer = section(schedule='linear', warmup_epochs=1.0, learning_rate=2.0)
  rate = optimizers.learning_rate(optimizer, batch_size=8, steps_per_epoch=5, total_steps=25)
  expected = [2 * s / 5 if s < 5 else 2 * (25 - s) / 20 for s in range(26)]
  np.testing.assert_allclose([rate(s) for s in range(26)], expected, atol=1e-6)


@pytest.mark.parametrize('warmup', [0.0, 1.0])
def test_drops_at_the_milestones(warmup):
  optimizer = section(schedule='step', learning_rate=1.0, milestones=(3, 5), decay=0.1, warmup_epochs=warmup)
  rate = optimizers.learning_rate(optimizer, batch_size=8, steps_per_epoch=4, total_steps=24)
  expected = [(s / 4 if s < 4 * warmup else 1.0) * 0.1 ** ((s >= 12) + (s >= 20)) for s in range(24)]
  np.testing.assert_allclose([rate(s) for s in range(24)], expected, rtol=1e-5)


def test_milestones_at_the_same_step_all_count():
  optimizer = section(schedule='step', learning_rate=1.0, milestones=(0.9, 1.1), decay=0.1)
  rate = optimizers.learning_rate(optimizer, batch_size=8, steps_per_epoch=4, total_steps=8)
  np.testing.assert_allclose([rate(s) for s in range(8)], [1.0] * 4 + [0.01] * 4, rtol=1e-5)


def test_warm_up_longer_than_the_run_is_refused():
  with pytest.raises(ValueError, match=r'optimizer.warmup_epochs = 9.0 is 45 steps, and the run has 45'):
    optimizers.learning_rate(section(warmup_epochs=9.0), batch_size=8, steps_per_epoch=5, total_steps=45)


@pytest.mark.parametrize(('key', 'value', 'fix'), [('name', 'sdg', 'sgd'), ('schedule', 'cosin', 'cosine')])
def test_unknown_names_are_refused(key, value, fix):
  optimizer = section(**{key: value})
  message = f"^optimizer.{key} = '{value}' is not a valid choice: did you mean '{fix}'"
  with pytest.raises(ValueError, match=message):
    optimizers.create(optimizer, lambda _: 0.1)
  with pytest.raises(ValueError, match=message):
    optimizers.learning_rate(optimizer, batch_size=8, steps_per_epoch=5, total_steps=45)


@NAMES
def test_the_learning_rate_of_a_predictor_may_stay(name):
  """SimSiam: the predictor is trained as at a constant learning rate, everything else by the schedule."""
  settings = dict(name=name, learning_rate=0.1, weight_decay=1e-3)
  clock = dict(batch_size=256, steps_per_epoch=2, total_steps=6)
  params = {'network': {'encoder': weights(), 'predictor': weights()}}

  def trained(schedule, **changes):
    chosen = section(**settings, schedule=schedule, **changes)
    rate, peak = optimizers.learning_rate(chosen, **clock), optimizers.peak_learning_rate(chosen, 256)
    loss = lambda params: sum(quadratic(part) for part in params['network'].values())
    return train(optimizers.create(chosen, rate, peak), params, 6, loss)['network']

  both, cosine, constant = trained('cosine', fixed_predictor=True), trained('cosine'), trained('constant')
  chex.assert_trees_all_close(both['encoder'], cosine['encoder'], rtol=1e-5)
  chex.assert_trees_all_close(both['predictor'], constant['predictor'], rtol=1e-5)
  assert np.abs(cosine['predictor']['kernel'] - constant['predictor']['kernel']).max() > 1e-4


def test_only_a_predictor_can_keep_its_learning_rate(tmp_path):
  with pytest.raises(ValueError, match=r"^optimizer.fixed_predictor = True needs a predictor, and 'simclr' has none"):
    builder.build(tiny(tmp_path, **{'optimizer.fixed_predictor': True}))
