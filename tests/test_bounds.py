"""What would hang, crash or report a wrong number is refused in one line: sizes, numbers beyond float32, odd files."""

import math
import os
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from configs import base
from ssl_jax import config, registry
from ssl_jax.config import rules
from ssl_jax.data import sources
from ssl_jax.evals import check, features, knn, linear
from ssl_jax.run import builder
from ssl_jax.run.devices import Devices
from tests.helpers import tiny


def one_line(error, *parts):
  assert '\n' not in str(error.value)
  for part in parts:
    assert part in str(error.value)


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    ('eval.temperature=1e-300', 'eval.temperature = 1e-300 must be above 0 in float32 and at most 1e+06'),
    ('eval.views=1e18', 'eval.views = 1000000000000000000 must be at least 2 and at most 64'),
    ('views=100000', 'views = 100000 must be at least 1 and at most 64'),
    ('data.image_size=1e9', 'data.image_size = 1000000000 must be at least 1 and at most 4096'),
    ('data.image_size=100000', 'data.image_size = 100000 must be at least 1 and at most 4096'),
    ('steps=100000000000000000000', 'steps = 100000000000000000000 must be at least 0 and at most 2147483647'),
    ('optimizer.milestones=1e999', 'optimizer.milestones = (inf,) must be different positive epochs'),
    ('data.stored_size=1e26', 'data.stored_size = 1000000000000000'),
    ('data.workers=100000', 'data.workers = 100000 must be at least 0 and at most 256'),
    ('eval.k=(True,)', 'eval.k = (True,) must be'),
    ('eval.seeds=(True,)', 'eval.seeds = (True,) must be'),
    ('eval.crop=1e-300', 'eval.crop = 1e-300 must be from 0.1 to 1'),
    ('ema=0.9999999999999', 'ema = 0.9999999999999 must be in [0, 1) after rounding to float32'),
    ('optimizer.momentum=0.9999999999999', 'must be in [0, 1) after rounding to float32'),
    ('optimizer.betas=(0.9,0.9999999999999)', 'two numbers in [0, 1) after rounding to float32'),
    ('optimizer.learning_rate=1e300', 'optimizer.learning_rate = 1e+300 must be above 0 in float32 and at most 1e+06'),
    ('optimizer.learning_rate=1e-300', 'optimizer.learning_rate = 1e-300 must be above 0 in float32'),
    ('optimizer.learning_rate=1' + 400 * '0', 'optimizer.learning_rate = 1e+400 must be of type float'),
    ('optimizer.clip=1e-300', 'optimizer.clip = 1e-300 must be 0, or at least 1.2e-38 (float32)'),
    ('parallel.cpu_devices=1000000', 'parallel.cpu_devices = 1000000 must be at least 1 and at most 256'),
    ('batch_size=16000000', 'batch_size = 16000000 with views = 2 of 32 pixels needs 366 GiB, and this machine has'),
    ('temperature.tau={1: 2}', 'temperature.tau = {1: 2} must have names without dots as its keys, not 1'),
    ('model.name=[1]', "model.name = '[1]' is"),
    ('augment_other=3', "config key 'augment_other' = 3 is a section: set one of its keys"),
  ],
)
def test_a_number_out_of_bounds_is_refused(monkeypatch, override, message):
  monkeypatch.setattr(rules, 'memory', lambda: 24 * 2**30)
  with pytest.raises(ValueError) as error:
    chosen = config.load('configs/cifar10.py', [override])
    config.validate(chosen, base.get_config())
    builder.build(chosen)
  one_line(error, message)


def test_every_number_of_the_config_has_bounds():
  numbers = lambda x: isinstance(x, int | float | list) and not isinstance(x, bool)
  flat = config.flatten(base.get_config())
  named = tuple(f'{section}.' for section in config.NAMED)
  assert {key for key, value in flat.items() if numbers(value) and not key.startswith(named)} == set(config.RULES)
  for key, (holds, _) in config.RULES.items():
    for value in (math.nan, math.inf, -math.inf, -1, 10**40):
      with pytest.raises(ValueError):
        registry.require(key, value, holds, 'in bounds')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model.stage_sizes': ()}, 'model.stage_sizes = () must be block counts from 1 to 200'),
    ({'model.stage_sizes': (10**9,)}, 'model.stage_sizes = (1000000000,) must be block counts from 1 to 200'),
    ({'model': dict(name='vit_tiny32', depth=10**9)}, 'model.depth = 1000000000 must be at least 1 and at most 200'),
    ({'model.width': True}, 'model.width = True must be a whole number'),
    ({'projector.features': ()}, 'projector.features = () must be layer widths'),
    ({'projector.features': (2**24, 2**24)}, 'the network needs 1,048,'),
    ({'projector': dict(name='dino', features=())}, 'projector.features = () must be layer widths'),
    ({'augment.contrast': 1e30}, 'augment.contrast = 1e+30 must be finite and at least 0, and at most 100'),
    ({'augment.crop_scale': {}}, 'augment.crop_scale = {} must be (low, high)'),
    ({'augment.crop_scale': {'a': {'b': 1}}}, "augment.crop_scale = {'a': {'b': 1}} must be (low, high)"),
    ({'augment.flip': True}, 'augment.flip = True must be a probability'),
    ({'temperature.tau': 1e-300}, 'temperature.tau = 1e-300 must be a finite number in the range of float32'),
    ({'temperature': dict(name='cosine', tau_min=0.1, tau_max=1e300)}, 'temperature.tau_max = 1e+300 must be'),
    ({'eval.file': '/nonexistent.npz'}, "eval.file = '/nonexistent.npz' is only for --mode=evaluate: leave it out"),
    ({'epochs': 2**31 - 1, 'steps': 0}, 'epochs = 2147483647 of 2 steps must be at most 2147483647 steps'),
  ],
)
def test_a_part_out_of_bounds_is_refused(tmp_path, changes, message):
  with pytest.raises(ValueError) as error:
    builder.build(tiny(tmp_path, **changes))
  one_line(error, message)


def data(source, path):
  return dict(source=source, path=str(path), train_split='train', test_split='test', broken='error', classes='')


def test_only_regular_files_are_read(tmp_path):
  os.mkfifo(tmp_path / 'pipe.npz')
  (tmp_path / 'zero.npz').symlink_to('/dev/zero')
  for path in (tmp_path / 'pipe.npz', tmp_path / 'zero.npz', pathlib.Path('/dev/zero')):
    with pytest.raises(ValueError) as error:
      sources.load(data('arrays', path), 'train')
    one_line(error, 'it does not exist, or is not a regular file')
  (tmp_path / 'train').mkdir()
  for name, make in {'pipe.png': os.mkfifo, 'zero.png': lambda path: path.symlink_to('/dev/zero')}.items():
    make(tmp_path / 'train' / name)
    source = sources.load(data('folder', tmp_path), 'train')
    for read in (lambda source=source: source.read(0), lambda source=source: source.arrays(8)):
      with pytest.raises(ValueError) as error:
        read()
      one_line(error, f'{name} is not a readable image (not a regular file)')
    (tmp_path / 'train' / name).unlink()


@pytest.mark.parametrize(
  ('version', 'message'),
  [(1, 'claims 196,608,000,000 bytes and has 0'), (3, 'has the .npy version 3.0, not 1.0 or 2.0')],
)
def test_a_header_that_claims_more_than_there_is_allocates_nothing(tmp_path, version, message):
  header = str({'descr': '|u1', 'fortran_order': False, 'shape': (2**16, 1000, 1000, 3)}).ljust(117) + '\n'
  length = len(header).to_bytes(2 if version == 1 else 4, 'little')
  with zipfile.ZipFile(tmp_path / 'huge.npz', 'w') as archive:
    archive.writestr('train_images.npy', b'\x93NUMPY' + bytes([version, 0]) + length + header.encode())
  with pytest.raises(ValueError) as error:
    sources.load(data('arrays', tmp_path / 'huge.npz'), 'train')
  one_line(error, f'train_images.npy {message}')


def test_an_archive_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
  np.savez(tmp_path / 'data.npz', train_images=np.zeros((4, 8, 8, 3), np.uint8))
  monkeypatch.setattr(rules, 'memory', lambda: 100)
  with pytest.raises(ValueError) as error:
    sources.load(data('arrays', tmp_path / 'data.npz'), 'train')
  one_line(error, 'train_images.npy needs')


def test_a_member_that_is_not_an_array_is_refused(tmp_path):
  with zipfile.ZipFile(tmp_path / 'text.npz', 'w') as archive:
    archive.writestr('train_images', 'no array')
  with pytest.raises(ValueError) as error:
    sources.load(data('arrays', tmp_path / 'text.npz'), 'train')
  one_line(error, 'it contains nothing, not train_images')


def test_a_name_with_a_newline_stays_in_one_line(tmp_path):
  (tmp_path / 'train').mkdir()
  (tmp_path / 'train' / 'a\nb.png').write_bytes(b'nothing')
  with pytest.raises(ValueError) as error:
    sources.load(data('folder', tmp_path), 'train').read(0)
  one_line(error, r"a\nb.png' is not a readable image")


def test_files_that_are_not_read_are_named(tmp_path, capsys):
  for name in ('train/a/0.png', 'train/b/0.png', 'train/b/1.gif', 'train/b/2.GIF', 'train/b/.hidden'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (8, 8)).save(tmp_path / name, format='gif' if 'png' not in name else 'png')
  assert len(sources.load(data('folder', tmp_path), 'train')) == 2
  assert 'train: 2 files are not read (2 .gif), only .jpg, .jpeg, .png' in capsys.readouterr().err
  sources.load(data('folder', tmp_path), 'train')  # as for test images that are held out of the same folder
  assert not capsys.readouterr().err


def test_scores_that_are_not_finite_are_an_error(monkeypatch):
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
  with pytest.raises(ValueError, match=r'^temperature = 1e-300 must be positive and finite in float32'):
    knn.accuracy(x, y, x, y, k=(5,), temperature=1e-300)
  with pytest.raises(ValueError, match=r'^k = \(True,\)'):
    knn.classify(x, y, x, k=(True,))
  with pytest.raises(ValueError, match=r'^scores of the linear classifier contain NaN or infinity'):
    linear.fit(x, y, x, y, 'cacr_small', learning_rates=[3e38])
  monkeypatch.setattr(knn, '_classify', lambda *_, **__: np.full((20, 1, 2), np.nan, np.float32))
  with pytest.raises(ValueError, match=r'^scores of 5 neighbors contain NaN or infinity'):
    knn.accuracy(x, y, x, y, k=(5,))


def test_features_that_are_not_finite_are_an_error():
  devices = Devices.choose('pmap', 1)
  source = sources.Arrays(np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2)
  apply = lambda params, stats, images, places: {'backbone': images[..., 0, 0].astype(np.float32) / 0}
  with pytest.raises(ValueError, match=r'^features of the backbone contain NaN or infinity'):
    features.extract(
      devices.map(apply, replicated=2, sharded=2, out='sharded'),
      devices,
      *devices.replicate((np.zeros(1),) * 2),
      source,
      size=8,
      batch_size=4,
    )
  check.finite('nothing', np.zeros(3), 'leave it')


LEAKS = """
import contextlib, sys
from ssl_jax.data import pipeline, sources

def main():
  data = dict(source='folder', path=sys.argv[1], train_split='train', test_split='train', broken='error', classes='')
  settings = dict(seed=0, batch_size=4, total_steps=40, crops=[pipeline.Crop(16)] * 2, num_workers=2)
  with contextlib.closing(pipeline.batches(sources.load(data, 'train'), **settings)) as batches:
    for _ in pipeline.prefetch(batches, lambda batch: batch):
      pass

if __name__ == '__main__':
  main()
"""


@pytest.mark.slow
@pytest.mark.parametrize('broken', [False, True])
def test_workers_leave_no_shared_memory(tmp_path, broken):
  (tmp_path / 'train').mkdir()
  for k in range(16):
    Image.new('RGB', (32, 32)).save(tmp_path / f'train/{k:02}.png')
  if broken:
    (tmp_path / 'train/07.png').write_bytes(b'nothing')
  (tmp_path / 'script.py').write_text(LEAKS)
  environment = {**os.environ, 'PYTHONPATH': '.'}
  command = [sys.executable, str(tmp_path / 'script.py'), str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
  assert (done.returncode != 0) == broken
  assert ('07.png is not a readable image' in done.stderr) == broken
  assert 'leaked' not in done.stderr and 'Exception ignored' not in done.stderr, done.stderr
