"""An exported encoder gives the same features in torch and in plain jax, and can be loaded again."""

import json
import re
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from absl import flags

import main
from configs import base
from ssl_jax import config, models, train
from ssl_jax.data import resolve
from ssl_jax.data.views import augment_settings
from ssl_jax.evals import evaluate
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.models import torch_weights
from ssl_jax.models.vit import ViT
from ssl_jax.reporting import export, model_card, report, torch_code
from ssl_jax.run import builder
from ssl_jax.run.state import average_of
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints
from tests.helpers import call, tiny
from tests.models import torch_models

pytestmark = pytest.mark.slow  # it trains, exports and compiles

BASIC, BOTTLENECK = torch_models.BasicBlock, torch_models.Bottleneck
VIT = dict(patch=4, width=24, depth=2, heads=3)


def random_variables(module, size, seed=0):
  """Random float32 variables on the host, without zeros and ones, which could hide errors."""
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, size, size, 3)), train=False))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    if path[-1].key in ('var', 'scale'):
      return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
    fan_in = np.prod(leaf.shape[:-1]) if leaf.ndim > 1 else 20
    return rng.normal(0, fan_in**-0.5, leaf.shape).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def written(folder, tensors):
  path = folder / 'model.safetensors'
  safetensors.numpy.save_file(tensors, path)
  return path


def exact_features(module, variables, images):
  """In float64, from the float32 variables."""
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
    apply = jax.jit(lambda v, x: module.clone(dtype=jnp.float64).apply(v, x, train=False))
    return np.asarray(apply(wide, images.astype(np.float64)))


@pytest.mark.parametrize(
  ('name', 'stem', 'block', 'stage_sizes', 'variance'),
  [
    ('resnet18', 'imagenet', BASIC, (2, 2, 2, 2), 1.0),
    ('resnet18_cifar', 'cifar', BASIC, (1, 2), 1.0),
    ('resnet50', 'imagenet', BOTTLENECK, (2, 1), 1.0),
    ('resnet18_cifar', 'cifar', BASIC, (1, 1), 1e-5),  # as small as the epsilon added to it
  ],
)
def test_a_resnet_gives_the_same_features_in_torch(name, stem, block, stage_sizes, variance, tmp_path):
  module = models.create(name, stage_sizes=stage_sizes, width=8)
  variables = random_variables(module, 33)
  shrink = lambda path, x: x * np.float32(variance) if path[-1].key == 'var' else x
  variables = jax.tree_util.tree_map_with_path(shrink, variables)
  reference = torch_models.ResNet(block, stage_sizes, stem=stem, width=8).double().eval()
  file = written(tmp_path, torch_weights.to_torch(variables))
  reference.load_state_dict(safetensors.torch.load_file(file), strict=True)
  x_torch, x = torch_models.images((2, 33, 47, 3))  # odd sizes reveal padding on the wrong side
  expected = reference(x_torch).detach().numpy()
  torch_models.assert_close(exact_features(module, variables, x), expected, 1e-10)


@pytest.mark.parametrize(
  ('name', 'block', 'stage_sizes'), [('18', BASIC, (2, 2, 2, 2)), ('50', BOTTLENECK, (3, 4, 6, 3))]
)
@pytest.mark.parametrize('stem', ['imagenet', 'cifar'])
def test_full_resnets_have_the_names_and_shapes_of_torchvision(name, block, stage_sizes, stem):
  module = models.create(f'resnet{name}' + ('_cifar' if stem == 'cifar' else ''))
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), train=False))
  found = torch_weights.to_torch(jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), shapes))
  expected = torch_models.ResNet(block, stage_sizes, stem=stem).state_dict()
  expected = {k: tuple(v.shape) for k, v in expected.items() if not k.endswith('num_batches_tracked')}
  assert {k: v.shape for k, v in found.items()} == expected


def test_the_small_alexnet_gives_the_same_features_in_torch(tmp_path):
  module = models.create('alexnet_small')
  variables = random_variables(module, 15)
  reference = torch_models.AlexNet(15).eval()
  reference.load_state_dict(
    safetensors.torch.load_file(written(tmp_path, torch_weights.to_torch(variables))), strict=True
  )
  x_torch, x = torch_models.images((3, 15, 15, 3))
  expected = reference(x_torch.float()).detach().numpy()
  torch_models.assert_close(jax.jit(lambda v: module.apply(v, x, train=False))(variables), expected, 1e-5)


def test_a_vit_gives_the_same_features_in_torch():
  """With the exported positions, added to token and patches as in timm; the layers of torch have other names."""
  module = ViT(**VIT)
  variables = random_variables(module, 12)
  tensors = torch_weights.to_torch(variables) | module.torch_constants(12)
  positions = torch.tensor(tensors.pop('pos_embed'))
  others = {
    'patch_embed.proj.': 'patch_embed.',
    'attn.qkv.': 'self_attn.in_proj_',
    'attn.proj.': 'self_attn.out_proj.',
    'mlp.fc': 'linear',
  }
  renamed = {}
  for name, tensor in tensors.items():
    for old, new in others.items():
      name = name.replace(old, new)
    renamed[name] = torch.tensor(tensor)
  reference = torch_models.ViT(**VIT).double().eval()
  reference.load_state_dict(renamed, strict=True)
  x_torch, x = torch_models.images((3, 12, 12, 3))
  hidden = reference.patch_embed(x_torch).flatten(2).transpose(1, 2)
  hidden = torch.cat([reference.cls_token.expand(3, 1, 24), hidden], 1) + positions.double()
  for block in reference.blocks:
    hidden = block(hidden)
  expected = reference.norm(hidden[:, 0]).detach().numpy()
  torch_models.assert_close(exact_features(module, variables, x), expected, 1e-6)  # positions are float32 in the file


@pytest.mark.parametrize('module', [models.create('resnet_tiny', width=4), ViT(**VIT)], ids=['resnet', 'vit'])
def test_a_round_trip_is_bit_identical(module, tmp_path):
  variables = random_variables(module, 12)
  path = written(tmp_path, torch_weights.to_torch(variables) | module.torch_constants(12))
  chex.assert_trees_all_equal(torch_weights.load(path, module, 12), variables, strict=True)


def test_a_torch_checkpoint_can_be_loaded(tmp_path):
  """Including its classifier and its step counters, which an encoder does not have."""
  reference = torch_models.ResNet(BASIC, (1, 1), stem='cifar', width=8)
  reference.fc = torch.nn.Linear(16, 10)
  torch_models.scramble(reference).float()
  safetensors.torch.save_file(reference.state_dict(), tmp_path / 'theirs.safetensors')
  module = models.create('resnet18_cifar', stage_sizes=(1, 1), width=8)
  variables = torch_weights.load(tmp_path / 'theirs.safetensors', module, 12)
  x_torch, x = torch_models.images((2, 12, 12, 3))
  expected = reference.double().eval()(x_torch).detach().numpy()
  torch_models.assert_close(exact_features(module, variables, x), expected, 1e-10)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """(folder, config, state) of a run in folder/run whose average differs from its weights; evaluations crop."""
  folder = tmp_path_factory.mktemp('saved')
  chosen = tiny(folder, ema=0.9, **{'eval.crop': 0.75, 'eval.view_images': 8, 'eval.linear': ''})
  prepared = builder.build(chosen)
  state, rng = prepared.initial_state(), np.random.default_rng(0)
  far = lambda x: x + rng.uniform(0, 0.5, x.shape).astype(np.float32)
  average = jax.tree.map(far, average_of(state.params, state.batch_stats))
  state = state.replace(step=np.int32(3), extra={**state.extra, 'average': average})
  checkpoints = Checkpoints(files.claim(folder / 'run', chosen.to_dict()), prepared.identity, 1)
  checkpoints.save(state)
  checkpoints.close()
  return folder, chosen, state


@pytest.fixture(scope='module')
def exported(saved):
  """The folder that `--mode=export` writes, without access to the images."""
  folder, chosen, _ = saved
  (folder / 'data.npz').rename(folder / 'away.npz')
  export.export(chosen, folder / 'run')
  (folder / 'away.npz').rename(folder / 'data.npz')
  return folder / 'run' / 'export'


def test_the_program_gives_the_features_of_the_run_without_this_package(saved, exported, tmp_path):
  """In a separate process, with the code of the exported README, for two batch sizes."""
  _, chosen, state = saved
  images = np.random.default_rng(1).integers(256, size=(5, 16, 16, 3), dtype=np.uint8)
  np.save(tmp_path / 'images.npy', images)
  snippet = re.search(r'```python\n(import jax\.export.*?)```', (exported / 'README.md').read_text(), re.DOTALL)[1]
  code = f"""
import sys
sys.modules['ssl_jax'] = sys.modules['flax'] = None  # importing them fails
import numpy as np
images = np.load({str(tmp_path / 'images.npy')!r})
{snippet}
np.savez({str(tmp_path / 'found.npz')!r}, five=features, two=encoder.call(images[:2]))
"""
  subprocess.run([sys.executable, '-I', '-c', code], cwd=exported, check=True)
  prepared = builder.build(chosen)
  shown = jax.vmap(prepared.views.eval_view)(images)
  expected = jax.jit(prepared.method.features)(*state.evaluated, shown)['backbone']
  with np.load(tmp_path / 'found.npz') as found:
    assert found['five'].dtype == np.float32
    np.testing.assert_allclose(found['five'], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found['two'], expected[:2], rtol=1e-5, atol=1e-6)
  others = jax.jit(prepared.method.features)(state.params, state.batch_stats, shown)['backbone']
  assert np.abs(expected - others).max() > 0.1, 'the average differs from the weights'


def test_equal_weights_give_equal_files():
  about, tensors = {f'key {k}': 'é' * k for k in range(9)}, {'b': np.ones((2, 3), np.float32), 'a': np.arange(4)}
  first, *others = {export._safetensors(tensors, dict(keys)) for keys in (about.items(), reversed(about.items()))}
  assert not others and int.from_bytes(first[:8], 'little') % 8 == 0
  for name, tensor in safetensors.numpy.load(first).items():
    np.testing.assert_array_equal(tensor, tensors[name])


def test_torch_gives_the_features_of_the_run_with_the_metadata_of_the_file(saved, exported):
  _, chosen, state = saved
  with safetensors.safe_open(exported / 'model.safetensors', 'np') as file:
    about = {k: v if k == 'ssl_jax' else json.loads(v) for k, v in file.metadata().items()}
  assert about['model'] == {'name': 'resnet_tiny', 'width': 8, 'stage_sizes': [1]}
  assert (about['step'], about['features'], about['image_size']) == (3, 8, 12)
  reference = torch_models.ResNet(BASIC, (1,), stem='cifar', width=8).double().eval()
  reference.conv1.stride = (2, 2)  # resnet_tiny's
  reference.load_state_dict(safetensors.torch.load_file(exported / 'model.safetensors'), strict=True)
  prepared = builder.build(chosen)
  images = prepared.eval_test.items[:, :12, :12]
  mean, std = (torch.tensor(about[name]).view(3, 1, 1).double() for name in ('mean', 'std'))
  expected = reference((torch.tensor(images.transpose(0, 3, 1, 2)) / 255 - mean) / std).detach().numpy()
  shown = (images / np.float32(255) - np.float32(about['mean']).reshape(1, 1, 1, 3)) / np.float32(about['std']).reshape(
    1, 1, 1, 3
  )
  found = jax.jit(prepared.method.features)(*state.evaluated, shown)
  torch_models.assert_close(found['backbone'], expected, 1e-5)

  head = torch.nn.Sequential(
    torch.nn.Linear(8, 8, bias=False),
    torch.nn.BatchNorm1d(8),
    torch.nn.ReLU(),
    torch.nn.Linear(8, 8, bias=False),
    torch.nn.BatchNorm1d(8),
  )
  places = {'fc1': '0', 'bn1': '1', 'fc2': '3', 'bn2': '4'}
  tensors = safetensors.torch.load_file(exported / 'projector.safetensors')
  split = {name: name.removeprefix('projector.').split('.') for name in tensors}
  head.load_state_dict({f'{places[layer]}.{leaf}': tensors[name] for name, (layer, leaf) in split.items()}, strict=True)
  projected = head.double().eval()(torch.tensor(expected)).detach().numpy()
  torch_models.assert_close(found['projector'], projected, 1e-5)


def test_the_card_has_results_of_the_exported_features_only(saved, tmp_path):
  _, chosen, _ = saved
  write = lambda name, **content: (tmp_path / f'{name}.json').write_text(json.dumps(content))
  write('summary', steps=3, knn5=50.0, online_probe=40.0)
  write('evaluation', step=3, knn5=60.0, linear=70.0, zero_shot=30.0, settings={'eval.features': 'projector'})
  card = model_card.read(chosen, tmp_path, 3)
  assert card.results == {'knn5': 50.0, 'online_probe': 40.0, 'zero_shot': 30.0}
  write('evaluation', step=3, knn5=60.0, linear=70.0, settings={'eval.linear': 'ridge'})
  card = model_card.read(chosen, tmp_path, 3)
  assert card.results == {'knn5': 60.0, 'online_probe': 40.0, 'linear': 70.0}
  assert '`eval.linear=ridge`, `eval.crop=0.75`' in model_card.results_section(card)
  write('evaluation', step=3, knn5=60.0, settings={'eval.flip': True})
  assert model_card.read(chosen, tmp_path, 3).results['knn5'] == 50.0


def test_the_card_has_results_of_one_protocol(saved, tmp_path):
  _, chosen, _ = saved
  write = lambda name, **content: (tmp_path / f'{name}.json').write_text(json.dumps(content))
  write('summary', steps=3, knn200=84.0, spearman_mean=60.0)
  write('evaluation', step=3, knn20=70.0, settings={'eval.vote': 'majority'})
  card = model_card.read(chosen, tmp_path, 3)
  assert card.results == {'knn20': 70.0, 'spearman_mean': 60.0}
  assert card.protocol['eval.vote'] == 'majority' and 'split: test\n' in card.head
  write('evaluation', step=3, knn20=70.0, settings={'eval.data.test_split': 'train[:10%]'})
  card = model_card.read(chosen, tmp_path, 3)
  assert card.results == {'knn20': 70.0} and 'split: train[:10%]\n' in card.head


def test_the_command_exports_the_same_files(saved, exported, tmp_path, capsys):
  folder, _, _ = saved
  copied = shutil.copytree(folder / 'run', tmp_path / 'run', ignore=shutil.ignore_patterns('export'))
  arguments = ['--config=', '--mode=export', f'--workdir={copied}']
  flags.FLAGS.unparse_flags()
  main.main(flags.FLAGS(['main.py', *arguments], known_only=True))
  said = capsys.readouterr().out
  assert said.startswith(f'resnet_tiny at step 3, images of 12 px to 8 features: {copied / "export"}\n')
  names = ['README.md', 'config.json', 'encoder.jax', 'model.safetensors', 'projector.safetensors']
  assert sorted(file.name for file in (copied / 'export').iterdir()) == names
  for name in names[3:]:
    found = [safetensors.numpy.load_file(place / name) for place in (copied / 'export', exported)]
    chex.assert_trees_all_equal(*found)
  shutil.rmtree(copied / 'checkpoints')
  error = call(*arguments)
  assert error.startswith('ssl_jax: ') and error.endswith('has no checkpoint yet: train first')
  error = call('--config=', '--mode=export', f'--workdir={tmp_path / "nowhere"}')
  assert 'does not hold a run' in error and not (tmp_path / 'nowhere').exists()


def test_the_torch_code_of_the_readme_gives_the_features_of_the_run(saved, exported, monkeypatch):
  """For resnet_tiny with another width and other stages, whose stem has stride 2."""
  _, chosen, state = saved
  prepared = builder.build(chosen)
  images = prepared.eval_test.items[:, :12, :12]
  code = re.search(r'```python\n(.*?)```', (exported / 'README.md').read_text(), re.DOTALL)[1]
  names = {'images': torch.tensor(images.transpose(0, 3, 1, 2))}
  monkeypatch.chdir(exported)
  exec(code, names)
  settings, _ = augment_settings(chosen)
  mean, std = (np.float32(settings[name]).reshape(1, 1, 1, 3) for name in ('mean', 'std'))
  shown = (images / np.float32(255) - mean) / std
  expected = jax.jit(prepared.method.features)(*state.evaluated, shown)['backbone']
  torch_models.assert_close(names['features'].detach().numpy(), expected, 1e-4)


@pytest.mark.parametrize(
  'model',
  [
    dict(name='resnet18', width=8),
    dict(name='resnet18', width=4, stage_sizes=(1, 2), stem_stride=1),
    dict(name='resnet50_cifar', width=4, stage_sizes=(2, 1)),
    dict(name='resnet18_cifar', width=4, stem_stride=2),
    dict(name='resnet_tiny'),
    dict(name='vit_tiny32', depth=2),
    dict(name='alexnet_small'),
  ],
  ids=lambda model: ' '.join(map(str, model.values())),
)
def test_the_torch_code_of_every_encoder_gives_the_same_features(model):
  module = models.create(**model)
  size = 36
  variables = random_variables(module, size)
  names = {}
  exec(torch_code.source(module, size), names)
  tensors = torch_weights.to_torch(variables) | module.torch_constants(size)
  names['encoder'].load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()}, strict=True)
  x_torch, x = torch_models.images((2, size, size, 3))
  found = names['encoder'].eval()(x_torch.float()).detach().numpy()
  expected = jax.jit(lambda v: module.apply(v, x.astype(np.float32), train=False))(variables)
  torch_models.assert_close(found, expected, 1e-4)


def test_every_encoder_has_torch_code():
  for name in models.ENCODERS:
    compile(torch_code.source(models.create(name), 32), name, 'exec')
  with pytest.raises(ValueError, match='the encoder Encoder has no torch code: add it to SOURCES'):
    torch_code.source(models.Encoder(), 32)


@pytest.mark.parametrize('method', [{}, dict(method=dict(name='moco', queue=64), projector=dict(name='moco'), ema=0.9)])
def test_a_run_starts_from_the_encoder_of_a_file(saved, exported, tmp_path, method):
  """All copies of the encoder start from it, and nothing else changes."""
  _, _, state = saved
  params, stats = state.evaluated
  start = builder.build(tiny(tmp_path, init=str(exported / 'model.safetensors'), **method)).initial_state()
  plain = builder.build(tiny(tmp_path, **method)).initial_state()
  encoders = [start.params['network']['encoder']]
  encoders += [start.extra['momentum']['encoder'], start.extra['average']['network']['encoder']] if method else []
  for encoder in encoders:
    chex.assert_trees_all_equal(encoder, params['network']['encoder'])
  chex.assert_trees_all_equal(start.batch_stats['encoder'], stats['encoder'])
  chex.assert_trees_all_equal_structs(start, plain)
  chex.assert_trees_all_equal(start.params['network']['projector'], plain.params['network']['projector'])


@pytest.fixture
def starting(exported, tmp_path):
  """The config of a run of one step from the exported encoder, a copy of it in tmp_path."""
  file = shutil.copy(exported / 'model.safetensors', tmp_path)
  settings = {'eval.crop': 0.75, 'eval.view_images': 8, 'eval.linear': '', 'eval.at_start': True}
  return tiny(tmp_path, init=str(file), steps=1, **settings)


def test_the_weights_of_a_file_can_be_evaluated(saved, starting, tmp_path):
  _, chosen, state = saved
  evaluator = ImageEvaluator(builder.build(chosen))
  expected = evaluator.scores(evaluator.run.devices.replicate(state))
  results = evaluate.evaluate(starting, tmp_path / 'theirs')
  assert {'step': 0, **expected}.items() <= results.items()
  (file,) = (tmp_path / 'theirs' / 'features').iterdir()
  with np.load(file) as found:
    np.testing.assert_array_equal(found['test_backbone'], evaluator.latest[1])
  page = report.report(tmp_path / 'theirs').with_suffix('.md').read_text()
  assert f'features of the weights of {starting.init}' in page and f'"{starting.init}"' in page
  with pytest.raises(ValueError, match=r'holds an evaluation of other weights \(evaluation.json\): give another dir'):
    train.train(starting, tmp_path / 'theirs')

  train.train(starting, tmp_path / 'run')
  assert {'step': 0, **expected}.items() <= metric_log.read(tmp_path / 'run')[0].items()


def test_an_untrained_encoder_can_be_evaluated(starting, tmp_path):
  starting.init = 'random'
  prepared = builder.build(starting)
  evaluator = ImageEvaluator(prepared)
  expected = evaluator.scores(prepared.devices.replicate(prepared.initial_state()))
  results = evaluate.evaluate(starting, tmp_path / 'untrained')
  assert {'step': 0, **expected}.items() <= results.items()
  assert 'similarities_TP' in np.load(tmp_path / 'untrained' / 'evaluation.npz')


def test_a_resumed_run_does_not_need_the_initial_weights(starting, tmp_path):
  starting.eval.k = ()
  train.train(starting, tmp_path / 'run')
  (tmp_path / 'model.safetensors').unlink()
  assert train.train(starting, tmp_path / 'run')['steps'] == 1
  starting.init = ''
  with pytest.raises(ValueError, match=r"holds a run of another config \(init = '' here, '.*safetensors' there"):
    train.train(starting, tmp_path / 'run')


def test_a_run_older_than_the_key_init_is_resumed_and_evaluated(saved, tmp_path):
  folder, chosen, state = saved
  copied = shutil.copytree(folder / 'run', tmp_path / 'run')
  for file in (copied / 'config.json', *(copied / 'checkpoints').glob('*/config/metadata')):
    known = json.loads(file.read_text())
    assert known.pop('init') == ''
    file.write_text(json.dumps(known))
  for file in (copied / 'checkpoints').glob('*/checksums.json'):
    file.unlink()  # older runs have none
  back = config.restore(files.read_config(copied), base.get_config())
  config.validate(back, base.get_config())
  assert evaluate.evaluate(back, copied)['step'] == 3
  longer = chosen.copy_and_resolve_references()
  longer.log.every_steps = 7
  prepared = builder.build(longer)
  checkpoints = Checkpoints(files.claim(copied, longer.to_dict()), prepared.identity)
  chex.assert_trees_all_equal(checkpoints.restore(prepared.initial_state()), state)
  checkpoints.close()


def without(tensors, name):
  return {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda t: without(t, 'bn1.running_var'),
      "lacks 'bn1.running_var' of the encoder: give a file of this",
    ),
    (lambda t: {'bn1.bias': t['bn1.bias']}, r"lacks '[\w.]+' and \d+ more of the encoder"),
    (
      lambda t: t | {'layer9.0.bn1.bias': np.ones(3)},
      "has 'layer9.0.bn1.bias', which the encoder does not have: give a file",
    ),
    (
      lambda t: t | {'conv1.weight': np.ones((8, 3, 7, 7), np.float32)},
      r"has 'conv1.weight' of shape \[8, 3, 7, 7\], and the encoder needs \[8, 3, 3, 3\]: give a file",
    ),
    (
      lambda t: t | {'conv1.weight': t['conv1.weight'].astype(np.int8)},
      r"has 'conv1.weight' \(int8\), which must hold only finite floats",
    ),
    (
      lambda t: t | {'bn1.bias': np.full(8, np.nan)},
      r"has 'bn1.bias' \(float64\), which must hold only finite floats: give another file",
    ),
    (
      lambda t: t | {'bn1.running_var': -t['bn1.running_var']},
      "has negative values in the variance 'bn1.running_var': give another file",
    ),
    (
      lambda t: {f'module.{name}': value for name, value in t.items()},
      r"has 'module\.[\w.]+' and \d+ more, which the encoder does not have: remove the prefix 'module\.'",
    ),
  ],
  ids=['missing', 'many missing', 'spare', 'shape', 'integers', 'nan', 'variance', 'prefix'],
)
def test_unsuitable_weights_are_refused_in_one_line_before_images_are_decoded(exported, tmp_path, change, message):
  tensors = safetensors.numpy.load_file(exported / 'model.safetensors')
  path = written(tmp_path, {k: np.ascontiguousarray(v) for k, v in change(tensors).items()})
  refused(tmp_path, path, message)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, 'is not a file: give a safetensors file, such as that of --mode=export'),
    (b'PK\x03\x04 a pickle', r'is not a complete safetensors file of floats \(.+\): give model.safetensors'),
    (
      # numpy has no float8
      (62).to_bytes(8, 'little') + b'{"x":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}    ' + b'\0',
      r'is not a complete safetensors file of floats \(.+\): give model.safetensors',
    ),
  ],
)
def test_files_that_are_not_safetensors_are_refused_in_one_line(tmp_path, content, message):
  path = tmp_path / 'resnet.pth'
  if content:
    path.write_bytes(content)
  refused(tmp_path, path, message)


def refused(tmp_path, path, message):
  chosen = tiny(tmp_path, init=str(path))
  with (
    pytest.MonkeyPatch.context() as patched,
    pytest.raises(ValueError, match=f'^init = {str(path)!r} {message}') as error,
  ):
    patched.delattr(resolve, 'placed')  # what decodes the images
    builder.build(chosen)
  assert '\n' not in str(error.value)


def test_learned_positions_are_refused(tmp_path):
  module = ViT(**VIT)
  tensors = torch_weights.to_torch(random_variables(module, 12)) | module.torch_constants(12)
  path = written(tmp_path, tensors | {'pos_embed': tensors['pos_embed'] + np.float32(0.1)})
  with pytest.raises(ValueError, match="has 'pos_embed' that differs from the fixed one of this encoder: give another"):
    torch_weights.load(path, module, 12)


def saved_in(folder, chosen):
  """A workdir with a checkpoint of an untrained run."""
  prepared = builder.build(chosen)
  checkpoints = Checkpoints(files.claim(folder / 'run', chosen.to_dict()), prepared.identity, 1)
  state = prepared.initial_state().replace(step=np.int32(1))
  checkpoints.save(state)
  checkpoints.close()
  return folder / 'run', state


def test_detectron2_loads_a_resnet50_and_computes_its_features(tmp_path, monkeypatch):
  """Its backbone, reimplemented: every tensor is used, and the features are ours. The export's command makes a .pth."""
  sizes = dict(name='resnet50', width=8, stage_sizes=(2, 1, 1, 1))
  monkeypatch.setattr(export, 'is_r50_c4', lambda encoder: True)  # it is smaller
  augment = dict(name='dystress_cifar', jitter=0.0, grey=0.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
  workdir, state = saved_in(tmp_path, tiny(tmp_path, model=sizes, augment=augment))
  folder = export.export(config.restore(files.read_config(workdir), base.get_config()), workdir)
  readme = (folder / 'README.md').read_text()
  command = re.search(r'```\n(python -c "\nimport torch.*?)```', readme, re.DOTALL)[1]
  subprocess.run(['bash', '-c', command.replace('python', sys.executable, 1)], cwd=folder, check=True)
  loaded = torch.load(folder / 'detectron2.pth', weights_only=True)
  theirs = torch_models.Detectron2((2, 1, 1, 1), width=8)
  missing = theirs.load_state_dict(loaded['model'], strict=False)
  assert missing.unexpected_keys == [] and all(key.endswith('num_batches_tracked') for key in missing.missing_keys)
  x_torch, x = torch_models.images((2, 65, 47, 3))
  found = theirs.double().eval()(x_torch).mean(dim=(2, 3)).detach().numpy()
  module = models.create(**sizes)
  params, stats = state.evaluated
  variables = {'params': params['network']['encoder'], 'batch_stats': stats['encoder']}
  torch_models.assert_close(exact_features(module, variables, x), found, 1e-6)
  # The two commands of Table 7, with our normalization in detectron2's units.
  assert "MODEL.PIXEL_MEAN '[123.675, 116.28, 103.53]' MODEL.PIXEL_STD '[58.395, 57.12, 57.375]'" in readme
  assert readme.count('python train_net.py --config-file') == 2 and 'SOLVER.MAX_ITER 90000' in readme
  assert not list(folder.glob('*.pkl'))


def test_the_names_are_those_of_r50_c4_and_other_encoders_have_none():
  shapes = jax.eval_shape(
    lambda: models.create('resnet50').init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), train=False)
  )
  found = torch_weights.to_detectron2(
    torch_weights.to_torch(jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), shapes))
  )
  wanted = {k: tuple(v.shape) for k, v in torch_models.Detectron2((3, 4, 6, 3)).state_dict().items()}
  assert {k: v.shape for k, v in found.items()} == {k: v for k, v in wanted.items() if 'num_batches' not in k}
  assert export.is_r50_c4(models.create('resnet50'))
  for name in ('resnet18', 'resnet101', 'resnet50_cifar', 'vit_s16', 'alexnet_small'):
    assert not export.is_r50_c4(models.create(name))
  assert not export.is_r50_c4(models.create('resnet50', width=128))
