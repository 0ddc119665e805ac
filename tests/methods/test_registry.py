"""From a config to a method: what is refused, every recipe, and a method that is added from outside."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, captions, cifar10
from ssl_jax import config, methods, models, train
from tests.helpers import asked_to_stop_at, changed, final, tiny

NONE = dict(name='none')


def create(changes):
  return methods.create(changed(base.get_config(), changes), steps_per_epoch=10, total_steps=100, examples=1000)


@pytest.mark.parametrize('name', cifar10.VARIANTS)
def test_every_recipe_builds(name):
  chosen = cifar10.get_config(name)
  if chosen.model.name.startswith('resnet'):
    config.override(chosen, 'model.stage_sizes', (1, 1, 1, 1))  # as wide at the end, and faster to trace
  method = methods.create(chosen, steps_per_epoch=390, total_steps=78000, examples=50000)
  images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
  params, _, extra = jax.eval_shape(method.init, jax.random.key(0), images)
  assert params['network'].keys() == {'encoder', 'projector'} | ({'predictor'} if method.predictor else set())
  assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(extra))


def test_every_method_has_a_recipe():
  of_pairs = {captions.get_config(name).method.name for name in captions.VARIANTS}
  of_images = {cifar10.get_config(name).method.name for name in cifar10.VARIANTS}
  assert of_pairs == {'image_text'} and of_pairs | of_images == set(methods.METHODS)


@pytest.mark.parametrize(('period', 'epochs'), [(4, 4), (None, 10)])
def test_the_period_of_a_temperature_is_in_epochs(period, epochs):
  method = create({'temperature': dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=period)})
  steps = np.array([0, 5, 10, 20, 35])
  expected = 0.1 + 0.9 * (1 + np.cos(2 * np.pi * steps / 10 / epochs)) / 2
  np.testing.assert_allclose([method.temperature.at({}, step) for step in steps], expected, rtol=1e-5)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'method': dict(name='moco', queue=1000)}, 'method.queue = 1000 must be a multiple of batch_size = 128: try 896'),
    ({'method': dict(name='moco', queue=100)}, 'method.queue = 100 must be a multiple of batch_size = 128: try 128'),
    (
      {'method': dict(name='moco', momentum=1.5)},
      r'method.momentum = 1.5 must be in \[0, 1\]',
    ),
    (
      {'method': dict(name='byol', final_momentum=1.5), 'loss': dict(name='byol'), 'temperature': NONE},
      r'method.final_momentum = 1.5 must be in \[0, 1\]',
    ),
    ({'method': dict(name='moco', quue=128)}, "method.quue = 128 is not a parameter of 'moco': did you mean 'queue'"),
    ({'method': dict(name='moco', predictor=dict(name='byol'))}, "method.predictor = .* is not a parameter of 'moco'"),
    (
      {'method': dict(name='moco_v3', predictor=dict(name='bylo'))},
      "method.predictor.name = 'bylo' is not a known predictor: did you mean 'byol'",
    ),
    ({'method': dict(name='memory_bank', negatives=-1)}, 'method.negatives = -1 must be'),
    ({'method': dict(name='memory_bank', negatives=100.0)}, 'method.negatives = 100.0 must be a whole number'),
    ({'method': dict(name='simclr', block=8.0)}, 'method.block = 8.0 must be'),
    ({'method': dict(name='simclr', block=-1)}, 'method.block = -1 must be a number of queries, or 0'),
    (
      {'method': dict(name='simclr', block=64, by_view_pair=True), 'loss': dict(name='decoupled')},
      'method.block = 64 cannot be combined with by_view_pair=True',
    ),
    (
      {'method': dict(name='simclr', by_view_pair=True)},
      "method.by_view_pair = True needs a loss that is a term of .* and 'info_nce' is not: give one of decoupled,",
    ),
    (
      {'method': dict(name='swav', freeze_epochs='x'), 'loss': dict(name='swav')},
      "method.freeze_epochs = 'x' must be a whole number of epochs",
    ),
    (
      {'method': dict(name='simclr', similarity='cos')},
      "method.similarity = 'cos' is not a valid choice: did you mean 'cosine'",
    ),
    (
      {
        'method': dict(name='simclr', similarity='dot'),
        'loss': dict(name='cacr', t_pos=1.0, t_neg=2.0),
        'temperature': NONE,
      },
      "method.similarity = 'dot' must be 'cosine' for the loss 'cacr': it takes 2 - 2s for the squared distance",
    ),
    (
      {
        'method': dict(name='simclr', similarity='euclidean'),
        'temperature': dict(name='cosine', tau_min=0.1, tau_max=0.2),
      },
      "method.similarity = 'euclidean' must be 'cosine' .*: the temperature is a function of the cosine",
    ),
    ({'views': 1}, "views = 1 must be at least 2 for 'simclr'"),
    ({'method': dict(name='byol')}, "loss.name = 'info_nce' is not a loss of the method 'byol': give one of byol"),
    ({'loss': dict(name='vicreg')}, "loss.name = 'vicreg' is not a loss of the method 'simclr'"),
    (
      {'method': dict(name='byol'), 'loss': dict(name='byol')},
      "the loss 'byol' takes no temperature: set temperature.name=none",
    ),
    (
      {'method': dict(name='swav'), 'loss': dict(name='swav'), 'temperature': NONE},
      "temperature.name = 'none', but the loss 'swav' needs a temperature",
    ),
    *(
      (
        {'method': {'name': name}, 'loss': {'name': name}, 'temperature': dict(name='cosine', tau_min=0.1, tau_max=1)},
        f"temperature.name = 'cosine' is a function of the similarity, and the method '{name}' needs a number",
      )
      for name in ('swav', 'dino')
    ),
    (
      {'method': dict(name='swav', queue=100), 'loss': dict(name='swav')},
      'method.queue = 100 must be a multiple of batch_size = 128: try 128',
    ),
    ({'method': dict(name='swav', epsilon=0.0), 'loss': dict(name='swav')}, r'method.epsilon = 0.0 must be'),
    (
      {'method': dict(name='redundancy'), 'loss': dict(name='barlow_twins', lam=-1.0), 'temperature': NONE},
      'loss.lam = -1.0 must be',
    ),
    (
      {'method': dict(name='redundancy'), 'loss': dict(name='barlow_twins', lamb=1.0), 'temperature': NONE},
      "loss.lamb = 1.0 is not a parameter of 'barlow_twins': did you mean 'lam'",
    ),
    (
      {'method': dict(name='redundancy'), 'loss': dict(name='arb', groups=3), 'temperature': NONE},
      'loss.groups = 3 must be a divisor of D = 128',
    ),
    (
      {'method': dict(name='redundancy'), 'loss': dict(name='w_mse'), 'temperature': NONE},
      'loss.eps = 0.0 needs more than 128 examples, the number of features, and there are 128: raise eps',
    ),
    (
      {'method': dict(name='dino', teacher_temperature=dict(name='linear', start=1)), 'loss': dict(name='dino')},
      'method.teacher_temperature',
    ),
    (
      {'method': dict(name='dino', teacher_temperature=dict(name='learnable', tau=0.1)), 'loss': dict(name='dino')},
      'method.teacher_temperature = .* must be a number or a schedule, because no gradient reaches the teacher',
    ),
    *(
      (
        {'method': dict(name='dino', teacher_temperature=tau), 'loss': dict(name='dino')},
        'method.teacher_temperature = .* must be a number or a schedule, because no gradient reaches the teacher',
      )
      for tau in (
        dict(name='constant', tau=dict(name='learnable')),
        dict(name='none'),
        dict(name='cosine', tau_min=0.1, tau_max=0.2),
      )
    ),
    (
      {'method': dict(name='dino', teacher_temperature=None), 'loss': dict(name='dino')},
      'method.teacher_temperature = None must be',
    ),
    (
      {'method': dict(name='isogclr'), 'loss': dict(name='robust_contrastive', rho=-5), 'temperature': NONE},
      'loss.rho = -5 must be at least 0 and finite',
    ),
    (
      {
        'method': dict(name='redundancy'),
        'projector': dict(name='barlow_twins', features=(64, None)),
        'loss': dict(name='arb', groups=96),
        'temperature': NONE,
      },
      'loss.groups = 96 must be a divisor of D = 512',
    ),
    ({'method': dict(name='dino', centre_momentum=1.0), 'loss': dict(name='dino')}, 'method.centre_momentum = 1.0'),
    ({'ema': 1.0}, r'ema = 1.0 must be in \[0, 1\)'),
    ({'small_crops.scale': (0.5, 0.1)}, r'small_crops.scale = \(0.5, 0.1\) must be 0 < low <= high <= 1'),
  ],
)
def test_a_wrong_method_is_refused_in_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as error:
    jax.eval_shape(create(changes).init, jax.random.key(0), jnp.zeros((2, 32, 32, 3)))
  assert '\n' not in str(error.value)


@pytest.mark.slow
def test_the_host_crops_small_views_too(tmp_path):
  changes = {'small_crops': dict(number=2, size=6), 'data.on_device': 'no', 'steps': 4, 'eval.k': ()}
  whole = tiny(tmp_path, **changes)
  parts = tiny(tmp_path, **changes, **{'parallel.devices': 2, 'parallel.map': 'shard_map', 'data.workers': 1})
  for chosen, name in ((whole, 'whole'), (parts, 'parts')):
    train.train(chosen, tmp_path / name)
  (losses, _), (other, _) = final(tmp_path / 'whole', whole), final(tmp_path / 'parts', parts)
  assert len(losses) == 4
  np.testing.assert_allclose(other, losses, rtol=1e-5)


def test_the_encoder_of_contributing_trains(tmp_path, monkeypatch):
  blocks = re.findall(r'```python\n(.*?)```', pathlib.Path('CONTRIBUTING.md').read_text(), re.DOTALL)
  (code,) = [block for block in blocks if '(Encoder)' in block]
  page = {'__name__': 'mean_of_patches'}
  exec(compile(code, 'CONTRIBUTING.md', 'exec'), page)
  monkeypatch.setitem(models.ENCODERS, 'mean_of_patches', page['MeanOfPatches'])
  chosen = tiny(tmp_path, model=dict(name='mean_of_patches', width=16), steps=2, dtype='bfloat16', **{'eval.k': ()})
  assert train.train(chosen, tmp_path / 'run')['steps'] == 2
  assert np.isfinite(final(tmp_path / 'run', chosen)[0]).all()


@pytest.mark.slow
def test_the_method_of_contributing_trains_and_resumes(tmp_path, monkeypatch):
  """The page's method, as it stands there, on two devices, interrupted once."""
  blocks = re.findall(r'```python\n(.*?)```', pathlib.Path('CONTRIBUTING.md').read_text(), re.DOTALL)
  (code,) = [block for block in blocks if 'class NNCLR' in block]
  assert len([line for line in code.splitlines() if line.strip()]) < 40
  page = {'__name__': 'nnclr'}
  exec(compile(code, 'CONTRIBUTING.md', 'exec'), page)
  monkeypatch.setitem(methods.METHODS, 'nnclr', page['NNCLR'])
  chosen = tiny(tmp_path, method=dict(name='nnclr', queue=64), steps=4, **{'parallel.devices': 2, 'eval.k': ()})
  train.train(chosen, tmp_path / 'whole')
  with asked_to_stop_at(2), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'parts')
  train.train(chosen, tmp_path / 'parts')
  assert final(tmp_path / 'parts', chosen)[0] == final(tmp_path / 'whole', chosen)[0]
