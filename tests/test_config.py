"""Each mistake is refused before anything is compiled, in one line with the key, the value and the fix."""

import importlib
import json
import pathlib
import re

import jax
import pytest

from configs import base, cifar10
from ssl_jax import config, methods, temperature
from ssl_jax.data import imbalance, views
from ssl_jax.run import optimizers

CONFIGS = sorted(p for p in pathlib.Path('configs').glob('*.py') if p.stem not in ('__init__', 'base'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_every_config_and_variant_is_valid(path):
  variants = getattr(importlib.import_module(f'configs.{path.stem}'), 'VARIANTS', {})
  for variant in ['', *variants]:
    config.validate(config.load(f'{path}:{variant},seed=3'), base.get_config())


def test_the_method_of_a_config_may_be_named():
  assert config.load('configs/cifar10.py:simclr,dystress') == config.load('configs/cifar10.py:dystress')
  with pytest.raises(ValueError, match=r"^option 'simclrr' is neither .* nor a known option .*: did you mean 'simclr'"):
    config.load('configs/cifar10.py:simclrr')


@pytest.mark.parametrize('path', ('configs/imagenet100.py', 'configs/stl10.py'))
@pytest.mark.slow
def test_every_recipe_of_large_images_makes_a_network(path):
  for variant in importlib.import_module(path.removesuffix('.py').replace('/', '.')).VARIANTS:
    chosen = config.load(f'{path}:{variant}')
    if variant != 'dystress' and chosen.model.name == 'resnet50':
      config.override(chosen, 'model.name', 'resnet18')  # traced in a third of the time
    method = methods.create(chosen, steps_per_epoch=1, total_steps=1)
    images = method.network.encoder.example(chosen.data.image_size)
    jax.eval_shape(method.init, jax.random.key(0), images)
    views.image_views(chosen, on_device=True)
    imbalance.create(chosen.imbalance)


def test_kukleva_sees_a_whole_period_on_imagenet():
  for path in ('configs/imagenet.py:kukleva', 'configs/imagenet100.py:kukleva,long_tail'):
    chosen = config.load(path)
    schedule = temperature.from_config(chosen.temperature, steps_per_epoch=10, total_steps=10 * chosen.epochs)
    found = [float(schedule.at({}, round(part * 10 * chosen.epochs))) for part in (0, 0.5, 1)]
    assert found == pytest.approx([1.0, 0.1, 1.0])


@pytest.mark.parametrize(
  ('variant', 'epochs', 'peak', 'momentum', 'tau'),
  [('moco_v3', 800, 4.8, 0.996, 1.0), ('moco_v3_vit', 300, 2.4e-3, 0.99, 0.2)],
)
def test_cacr_on_moco_v3_differs_from_it_only_in_the_loss_and_the_views(variant, epochs, peak, momentum, tau):
  plain, cacr = (config.load(f'configs/imagenet.py:{name}') for name in (variant, f'cacr_{variant}'))
  assert (plain.epochs, plain.batch_size, plain.temperature.tau) == (epochs, 4096, tau)
  assert optimizers.peak_learning_rate(plain.optimizer, plain.batch_size) == pytest.approx(peak)
  built = [methods.create(c, steps_per_epoch=1, total_steps=1) for c in (plain, cacr)]
  assert [(m.momentum, m.final_momentum, m.keys_together) for m in built] == [
    (momentum, 1.0, False),
    (momentum, 1.0, True),
  ]
  plain, cacr = config.flatten(plain), config.flatten(cacr)
  differ = {key for key in plain.keys() | cacr.keys() if plain.get(key) != cacr.get(key)}
  assert {key.split('.')[0] for key in differ} == {'views', 'loss', 'temperature', 'method'}
  assert cacr['views'] == 5, 'four positives'


@pytest.mark.parametrize('variant', ('moco_v3', 'cacr_moco_v3', 'simsiam', 'simclr_v2', 'fnc'))
def test_residual_blocks_start_at_zero_as_in_the_authors_codes(variant):
  chosen = config.load(f'configs/imagenet.py:{variant}').model
  assert chosen.to_dict() == {'name': 'resnet50', 'zero_init_residual': True}


@pytest.mark.parametrize('variant', ('moco_v3', 'cacr_moco_v3'))
def test_a_vit_has_no_residual_branches_to_start_at_zero(variant):
  assert 'zero_init_residual' not in config.load(f'configs/imagenet.py:{variant}_vit').model


def test_the_memory_bank_on_imagenet100_has_the_views_of_the_authors_code():
  assert config.load('configs/imagenet100.py:memory_bank').augment.to_dict() == {'name': 'moco_v2'}


def test_every_key_has_a_comment():
  lines = pathlib.Path('configs/base.py').read_text().splitlines()
  keys = [
    line for line in lines if re.match(r'  config\.[\w.]+(, config\.[\w.]+)* = ', line) and 'ConfigDict()' not in line
  ]
  described = [line for line in keys if '  # ' in line]
  plain = {re.match(r'  config\.([\w.]+)', line)[1] for line in keys} - {
    re.match(r'  config\.([\w.]+)', line)[1] for line in described
  }
  assert plain <= {  # names that say all
    'data.test_split',
    'optimizer.learning_rate',
    'optimizer.weight_decay',
    'optimizer.decay',
    'checkpoint.keep',
    'log.tensorboard',
    'eval.temperature',
    'eval.batch_size',
  }


def test_overrides_reach_nested_keys_with_their_types():
  chosen = config.load(
    'configs/cifar10.py',
    ['seed=3', 'optimizer.learning_rate=1', 'optimizer.milestones=(10,20)', 'data.name=7', 'log.tensorboard=false'],
  )
  assert (chosen.seed, chosen.optimizer.learning_rate, chosen.optimizer.milestones) == (3, 1.0, (10, 20))
  assert isinstance(chosen.optimizer.learning_rate, float)
  assert (chosen.data.name, chosen.log.tensorboard) == ('7', False)


def test_options_of_the_file_are_the_same_overrides():
  chosen = config.load('configs/cifar10.py:dystress,seed=5,optimizer.milestones=(10,20)')
  assert (chosen.temperature.name, chosen.seed, chosen.optimizer.milestones) == ('cosine', 5, (10, 20))


def test_a_new_name_drops_the_parameters_of_the_old_one_in_any_order():
  chosen = config.load(
    'configs/cifar10.py', ['temperature.tau_min=0.05', 'temperature.name=cosine', 'temperature.tau_max=1']
  )
  assert chosen.temperature.to_dict() == {'name': 'cosine', 'tau_min': 0.05, 'tau_max': 1}


@pytest.mark.parametrize(
  ('path', 'overrides'),
  [
    ('configs/cifar10.py:method.queue=8192,method.name=moco', []),
    ('configs/cifar10.py:method.queue=8192', ['method.name=moco']),
    ('configs/cifar10.py', ['method.queue=8192', 'method.name=moco']),
  ],
)
def test_options_and_flags_may_be_mixed_in_any_order(path, overrides):
  assert config.load(path, overrides).method.to_dict() == {'name': 'moco', 'queue': 8192}
  keys, planned = config.changed(path, overrides)
  assert keys == {'method.name', 'method.queue'} and planned.method.name == 'simclr'


def test_a_pair_counts_more_than_a_variant_in_any_order():
  for path in ('configs/cifar10.py:temperature.tau_min=0.05,dystress', 'configs/cifar10.py:dystress,seed=1'):
    assert config.load(path, ['temperature.tau_min=0.05']).temperature.tau_min == 0.05
  assert cifar10.get_config('temperature.tau_min=0.05,dystress').temperature.tau_min == 0.05


def test_commas_in_nested_brackets_do_not_split():
  nested = "temperature.tau={'name': 'linear_schedule', 'values': [(0, 1), (2, 3)], 'end': 1}"
  assert config.split_options(f'dystress,{nested},seed=1,') == ['dystress', nested, 'seed=1']


def test_a_schedule_can_be_typed_on_the_command_line():
  chosen = config.load(
    'configs/cifar10.py:dystress', ["temperature.tau_min={'name': 'linear_schedule', 'start': 0.1, 'end': 0.2}"]
  )
  assert chosen.temperature.tau_min.to_dict() == {'name': 'linear_schedule', 'start': 0.1, 'end': 0.2}


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    ('bach_size=64', r"config key 'bach_size' = 64 does not exist: did you mean 'batch_size'\?"),
    ('optimizer.learning_rat=1', r"'optimizer.learning_rat' = 1 does not exist: did you mean 'learning_rate'\?"),
    ('lr=1', r"config key 'lr' = 1 does not exist: did you mean 'optimizer.learning_rate'\?"),
    ('wd=1', r"config key 'wd' = 1 does not exist: did you mean 'optimizer.weight_decay'\?"),
    ('optimiser.learning_rate=1', r"'optimiser.learning_rate' does not exist: did you mean 'optimizer'\?"),
    ('seed.more=1', r"'seed.more' does not exist"),
    (
      'temperature.tau.name=linear_schedule',
      r"'temperature.tau.name' does not exist: set temperature.tau=\"\{'name': 'linear_schedule'\}\"$",
    ),
    (
      'optimizer=3',
      r"config key 'optimizer' = 3 is a section: set one of betas, clip, decay, exempt, fixed_predictor, learning_rate",
    ),
    ('batch_size=many', r"batch_size = 'many' must be of type int, such as 128"),
    ('batch_size=12.5', r'batch_size = 12.5 must be of type int'),
    ('log.tensorboard=1', r'log.tensorboard = 1 must be of type bool'),
    ('epochs=True', r'epochs = True must be of type int'),
    ('optimizer.milestones=soon', r"optimizer.milestones = \('soon',\) must be of type tuple"),
  ],
)
def test_a_wrong_override_is_refused(override, message):
  with pytest.raises(ValueError, match=message):
    config.load('configs/cifar10.py', [override])


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    ('optimizer.betas=(0.9,)', r'optimizer.betas = \(0.9,\) must be two numbers in \[0, 1\)'),
    ('optimizer.betas=(0.9,1.0)', r'optimizer.betas = \(0.9, 1.0\) must be two numbers in \[0, 1\)'),
    ('optimizer.momentum=1.0', r'optimizer.momentum = 1.0 must be in \[0, 1\)'),
    ('optimizer.milestones=(3,3)', r'optimizer.milestones = \(3, 3\) must be different positive epochs'),
    ('seed=2147483648', r'seed = 2147483648 must be from 0 to 2147483647'),
    ('eval.seeds=(0,2147483648)', r'eval.seeds = \(0, 2147483648\) must be whole numbers from 0 to 2147483647'),
    ('parallel.map=xmap', r"parallel.map = 'xmap' is not a valid choice: did you mean 'pmap'\?"),
    ('optimizer.learning_rate=0', r'optimizer.learning_rate = 0.0 must be above 0'),
    ('optimizer.learning_rate=nan', r"optimizer.learning_rate = 'nan' must be of type float"),
    ('optimizer.learning_rate=1e999', r'optimizer.learning_rate = inf must be above 0'),
    ('batch_size=1', r'batch_size = 1 must be at least 2'),
    ('seed=-1', r'seed = -1 must be from 0 to 2147483647'),
    ('data.stored_size=16', r'data.stored_size = 16 must be 0 or at least data.image_size = 32'),
    ('eval.k=(0,)', r'eval.k = \(0,\) must be numbers of neighbors'),
  ],
)
def test_a_wrong_value_is_refused(override, message):
  with pytest.raises(ValueError, match=message):
    config.validate(config.load('configs/cifar10.py', [override]), base.get_config())


def test_a_key_that_a_config_invents_is_refused():
  chosen = base.get_config()
  chosen.optimizer.nesterof = True
  with pytest.raises(ValueError, match=r'config key .optimizer\.nesterof. does not exist'):
    config.validate(chosen, base.get_config())


def test_a_file_or_variant_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match=r"did you mean 'configs/cifar10.py'\?"):
    config.load('configs/cifar01.py')
  with pytest.raises(ValueError, match=r"option 'distress' .*: did you mean 'dystress'\?"):
    config.load('configs/cifar10.py:distress')


def test_the_difference_of_two_runs_is_named_and_harmless_keys_are_not():
  one, other = base.get_config(), base.get_config()
  other.log.every_steps, other.parallel.map = 7, 'shard_map'
  assert config.difference(one.to_dict(), other.to_dict()) is None
  other.optimizer.learning_rate = 0.5
  assert config.difference(one.to_dict(), other.to_dict()) == 'optimizer.learning_rate = 0.5 here, 0.06 there'


def test_which_keys_may_change_in_a_resumed_run():
  flat = config.flatten(base.get_config()) | {'augment_other.solarize': 0.2, 'method.queue': 128}
  flat |= {'model.remat': True, 'method.block': 64, 'method.ring': True}
  name = lambda key: key if key.startswith(('data.', 'model.', 'method.')) else key.partition('.')[0]
  free = [key for key in flat if config.difference(flat, flat | {key: 'changed'}) is None]
  harmless = {'deterministic', 'data.path', 'data.workers', 'data.broken', 'data.cache'}
  harmless |= {'model.remat', 'method.block', 'method.ring'}
  harmless |= {'parallel', 'checkpoint', 'log', 'eval'}
  assert {name(key) for key in free} == harmless
  assert not {name(key) for key in flat.keys() - set(free)} & harmless


def test_a_config_survives_json():
  chosen = config.load('configs/cifar10.py:dystress')
  saved = json.loads(json.dumps(chosen.to_dict()))
  del saved['log']['tensorboard'], saved['init'], saved['data']['stored_size']  # as if the keys had come later
  back = config.restore(saved, base.get_config(), ['eval.k=(20,)'])
  config.validate(back, base.get_config())
  assert (back.optimizer.milestones, back.eval.k) == ((160, 190), (20,))
  assert config.difference(chosen.to_dict(), back.to_dict()) is None
  assert config.difference(saved, chosen.to_dict()) is None


def test_what_a_run_has_of_the_later_keys_stays():
  saved = config.load('configs/stl10.py', ['init=theirs.safetensors']).to_dict()
  back = config.restore(saved, base.get_config())
  assert (back.init, back.data.stored_size) == ('theirs.safetensors', 96)


def test_presets_of_older_runs_have_new_names_and_paths_stay():
  saved = config.load('configs/cifar10.py').to_dict()
  saved |= {'augment': {'name': 'supervised_cifar'}, 'projector': {'name': 'supervised_cifar'}}
  saved['eval']['linear'] = 'supervised_cifar'
  own = {'data.name': 'supervised_birds', 'data.path': 'supervised_birds', 'init': 'supervised_1.safetensors'}
  for key, value in own.items():
    section, _, last = key.rpartition('.')
    (saved[section] if section else saved)[last] = value
  found = config.flatten(config.upgrade(saved))
  assert {key: found[key] for key in own} == own
  assert {found[key] for key in ('augment.name', 'projector.name', 'eval.linear')} == {'balanced_cifar'}


@pytest.mark.parametrize(
  ('code', 'message'),
  [
    ('', "AttributeError: module 'config_file' has no attribute 'get_config'"),
    ('def get_config(): pass', 'TypeError: get_config'),
    ('def get_config(arg): pass', 'get_config returned a NoneType'),
    (
      'from configs import base\ndef get_config(arg):\n  c = base.get_config()\n  c.epochs = "many"\n  return c',
      'TypeError',
    ),
    ('import nothing_like_it', 'ModuleNotFoundError'),
    (
      'from configs import base\ndef get_config(arg):\n  c = base.get_config()\n  c["optimzer"]["x"] = 1\n  return c',
      'KeyError.*optimizer',
    ),
  ],
)
def test_a_file_that_makes_no_config_is_refused_in_one_line(tmp_path, code, message):
  (tmp_path / 'mine.py').write_text(code)
  with pytest.raises(ValueError, match=r'^--config=.*mine\.py. (cannot be loaded|is not a config).*' + message):
    config.load(str(tmp_path / 'mine.py'))


def test_epochs_that_would_not_count_are_refused():
  with pytest.raises(
    ValueError, match=r'^epochs = 2 has no effect, because steps = 1000 takes precedence: set steps=0 as well'
  ):
    config.load('configs/quickstart.py', ['epochs=2'])
  with pytest.raises(ValueError, match=r'^epochs = 2 has no effect'):
    config.load('configs/quickstart.py:epochs=2')
  assert config.load('configs/quickstart.py', ['epochs=2', 'steps=0']).epochs == 2
  assert config.load('configs/quickstart.py:epochs=2', ['steps=0']).epochs == 2


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'log': 3}, "config key 'log' = 3 must be a section"),
    ({'data': None}, "config key 'data' = None must be a section"),
    ({'a.b': 1}, 'config.json cannot be read \\(.*a.b.*\\): fix it, or remove it'),
    ({'steps': 'x'}, "steps = 'x' must be of type int"),
  ],
)
def test_a_damaged_recorded_config_is_refused(changes, message):
  saved = base.get_config().to_dict() | changes
  with pytest.raises(ValueError, match=message):
    config.validate(config.restore(saved, base.get_config()), base.get_config())


def test_a_whole_number_of_a_recorded_config_may_be_a_real_one():
  chosen = config.restore(base.get_config().to_dict() | {'ema': 0}, base.get_config())
  config.validate(chosen, base.get_config())
  assert (chosen.ema, type(chosen.ema)) == (0.0, float)
