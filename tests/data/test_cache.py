"""The cache of decoded images: equal to decoding, made once, and whole again after whatever happens to it."""

import errno
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import chex
import numpy as np
import pytest
from PIL import Image

from configs import base, imagenet100
from ssl_jax import config, train
from ssl_jax.data import cache, locks, resolve, sources
from tests.data import test_tar
from tests.data.test_sources import prepare
from tests.helpers import final, tiny

SIZE, IMAGES = 16, 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(cache, 'BLOCK', 4 * 3 * SIZE**2)  # six blocks of four images
  monkeypatch.setattr(cache, 'SAVE_SECONDS', 0.0)


@pytest.fixture
def folder(tmp_path):
  """Class folders of pictures of other shapes and sizes, wide, high and square."""
  rng = np.random.default_rng(0)
  for k in range(IMAGES):
    image = rng.integers(0, 256, (*rng.integers(10, 40, 2), 3), np.uint8)
    path = tmp_path / 'images' / 'train' / f'class{k % 3}' / f'{k:02}.{"jpg" if k % 2 else "png"}'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
  return tmp_path / 'images'


def chosen(folder, **changes):
  given = {'data.source': 'folder', 'data.name': 'pictures', 'data.path': str(folder), 'data.image_size': SIZE}
  made = base.get_config()
  for key, value in {**given, 'data.cache': str(folder.parent / 'cache'), **changes}.items():
    config.override(made, key, value)
  return made


def opened(folder, **changes):
  """(the source with nothing decoded, what `placed` makes of it)"""
  made = chosen(folder, **changes)
  source = resolve.open_split(made, 'train')
  return source, resolve.placed(made, source)[0]


def decoded(monkeypatch):
  """Collects the positions that are decoded from here on."""
  found, decode = [], sources.Source.decode

  def watched(self, positions, out):
    found.extend(positions)
    return decode(self, positions, out)

  monkeypatch.setattr(sources.Source, 'decode', watched)
  return found


def files(folder):
  (images,) = (folder.parent / 'cache').glob('*.npy')
  return images, images.with_suffix('.json')


def assert_as_decoded(folder, **changes):
  source, found = opened(folder, **changes)
  expected = resolve.open_split(chosen(folder, **changes), 'train').in_memory(SIZE)
  np.testing.assert_array_equal(found.items, expected.items)
  np.testing.assert_array_equal(found.labels, expected.labels)
  assert (found.class_names, found.skipped) == (expected.class_names, expected.skipped)
  assert found.origin is source
  return found


def test_it_holds_the_decoded_images_and_later_runs_map_it(folder, monkeypatch, capfd):
  monkeypatch.setattr(cache, 'SAVE_SECONDS', 1e9)  # written at the end at the latest
  found = assert_as_decoded(folder)
  assert f'decoding {IMAGES} images at {SIZE} pixels into' in capfd.readouterr().err
  images, _ = files(folder)
  written = images.stat().st_mtime_ns
  positions = decoded(monkeypatch)
  _, again = opened(folder)
  np.testing.assert_array_equal(again.items, found.items)
  assert len(positions) == cache.COMPARED, 'some are compared'
  assert images.stat().st_mtime_ns == written and not capfd.readouterr().err
  assert not again.items.flags.owndata and not again.items.flags.writeable
  np.testing.assert_array_equal(np.load(images, mmap_mode='r'), found.items)  # as anyone can read it


def test_of_a_tfds_set(tmp_path):
  prepare(tmp_path / 'sets')
  given = {'data.source': 'tfds', 'data.name': 'tiny', 'data.path': str(tmp_path / 'sets')}
  made = chosen(tmp_path / 'sets', **given)
  source = resolve.open_split(made, 'train')
  np.testing.assert_array_equal(resolve.placed(made, source)[0].items, source.arrays(SIZE)[0])
  first = source.fingerprint()
  assert source.subset(np.arange(5)).fingerprint() != first
  (records,) = (tmp_path / 'sets').rglob('*.array_record*')
  os.utime(records, (0, 0))
  assert resolve.open_split(made, 'train').fingerprint() != first


def test_of_tar_shards_with_captions(tmp_path):
  given = test_tar.pairs(tmp_path, broken='skip')
  test_tar.write(tmp_path / 'train-0003.tar', test_tar.sample(12, cls=b'0'))  # an image without text
  source = sources.load(given, 'train')
  source.paired, source.cache_name = True, 'pairs'
  expected = source.in_memory(SIZE)
  for _ in range(2):  # made, then mapped
    found = cache.load(source, SIZE, str(tmp_path / 'cache'))
    np.testing.assert_array_equal(found.items, expected.items)
    assert found.paired and found.captions == expected.captions
  images = sources.load(given, 'train')
  images.cache_name = 'pairs'
  assert (len(found), len(cache.load(images, SIZE, str(tmp_path / 'cache')))) == (12, 13)
  assert source.subset(np.arange(5)).fingerprint() != source.fingerprint()


def test_images_in_memory_have_no_file(tmp_path):
  images = sources.Arrays(np.zeros((3, 8, 8, 3), np.uint8))
  assert cache.load(images, 8, str(tmp_path / 'cache')).items is images.items
  assert not (tmp_path / 'cache').exists()


def replace(folder):
  """An image that is not among those that are decoded again for comparison."""
  Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(folder / 'train' / 'class0' / '03.jpg')


def add(folder):
  Image.fromarray(np.full((9, 9, 3), 7, np.uint8)).save(folder / 'train' / 'class1' / 'new.png')


def remove(folder):
  (folder / 'train' / 'class2' / '02.png').unlink()


@pytest.mark.parametrize('change', [replace, add, remove])
def test_a_folder_that_has_changed_is_decoded_again(folder, change):
  _, before = opened(folder)
  kept = before.items.copy()
  change(folder)
  assert_as_decoded(folder)
  files(folder)  # one file, not two
  np.testing.assert_array_equal(before.items, kept)  # a run that has mapped the old file keeps it


def test_other_choices_have_other_files(folder):
  opened(folder)
  opened(folder, **{'imbalance': dict(name='exponential_tail', ratio=0.5)})
  opened(folder, **{'data.stored_size': 20})
  assert len(list((folder.parent / 'cache').glob('*.npy'))) == 3


def test_an_image_larger_than_a_block_is_a_block(folder, monkeypatch):
  monkeypatch.setattr(cache, 'BLOCK', 3 * SIZE**2 - 1)
  assert_as_decoded(folder)
  assert len(json.loads(files(folder)[1].read_text())['checksums']) == IMAGES


def test_an_interrupted_build_goes_on_where_it_was(folder, monkeypatch, capfd):
  monkeypatch.setattr(cache, 'THREADS', 1)
  decode = sources.Source.decode

  def interrupted(self, positions, out):
    if positions[0] >= 12:
      raise KeyboardInterrupt
    return decode(self, positions, out)

  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(sources.Source, 'decode', interrupted)
    opened(folder)
  positions = decoded(monkeypatch)
  clock = itertools.count()
  monkeypatch.setattr(cache, 'time', types.SimpleNamespace(monotonic=lambda: 20.0 * next(clock)))  # a message per block
  opened(folder)
  said = re.findall(r'(\d+) of 24 images decoded, .* images/s, (\d+) s left', capfd.readouterr().err)
  assert [int(number) for number, _ in said] == [16, 20, 24] and said[-1] == ('24', '0')
  assert positions[-12:] == list(range(12, 24)) and set(positions[:-12]) < set(range(12)), 'the first are compared'
  assert_as_decoded(folder)


KILLED = """
import json, pathlib, sys, time
from ssl_jax.data import cache, sources
from tests.data import test_cache
folder = pathlib.Path(sys.argv[1])
cache.BLOCK, cache.SAVE_SECONDS, cache.THREADS = 4 * 3 * test_cache.SIZE**2, 0.0, 1
decode = sources.Source.decode
def saved():
  try:
    return sum(checksum is not None for checksum in json.loads(test_cache.files(folder)[1].read_text())['checksums'])
  except FileNotFoundError:
    return 0
def slow(self, positions, out):
  if positions[0] == 12:
    while saved() < 3:  # the blocks before this one, by another thread
      time.sleep(0.01)
    print('killable', flush=True)
    time.sleep(60)
  return decode(self, positions, out)
sources.Source.decode = slow
test_cache.opened(folder)
"""


@pytest.mark.slow
def test_a_killed_build_is_whole_again(folder):
  process = subprocess.Popen(
    [sys.executable, '-c', KILLED, str(folder)], stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[2]
  )
  assert process.stdout.readline() == b'killable\n'
  process.send_signal(signal.SIGKILL)
  process.wait()
  process.stdout.close()
  known = json.loads(files(folder)[1].read_text())['checksums']
  assert None not in known[:3] and known[3:] == [None] * 3
  assert_as_decoded(folder)


def flip(images, record):
  with images.open('r+b') as file:
    file.seek(-3 * SIZE**2 * 10, os.SEEK_END)  # an image of the fourth block
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 1]))


def cut(images, record):
  os.truncate(images, images.stat().st_size - 100)


def lose_images(images, record):
  images.unlink()


def lose_record(images, record):
  record.unlink()


def garble(images, record):
  record.write_text('{"fingerprint": [')


def header(images, record):
  with images.open('r+b') as file:
    file.write(b'something else')


def other_shape(images, record):
  np.save(images, np.zeros((2, 3), np.uint8))


def other_record(**changes):
  def damage(images, record):
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))

  return damage


def no_mapping(images, record):
  record.write_text('[]')


def empty_mapping(images, record):
  record.write_text('{}')


DAMAGES = (flip, cut, lose_images, lose_record, garble, header, other_shape, no_mapping, empty_mapping)


@pytest.mark.parametrize('damage', [*DAMAGES, other_record(checksums=[None]), other_record(broken=None)])
def test_damage_is_repaired(folder, damage, monkeypatch):
  opened(folder)
  damage(*files(folder))
  positions = decoded(monkeypatch)
  assert_as_decoded(folder)
  if damage is flip:
    assert len(set(positions)) <= 4 + cache.COMPARED + IMAGES and positions.count(13) >= 1


def test_pixels_that_decoding_no_longer_gives_are_decoded_again(folder, monkeypatch):
  """As after an update of Pillow that rounds differently: the file is intact."""
  opened(folder)
  monkeypatch.setattr(sources, 'square', lambda image, size: np.full((size, size, 3), image.width, np.uint8))
  assert_as_decoded(folder)


def test_broken_images_are_left_out_or_named(folder, capfd):
  for k in (5, 23):  # the last one is among those that are compared
    path = folder / 'train' / f'class{k % 3}' / f'{k:02}.jpg'
    path.write_bytes(path.read_bytes()[:40])
  with pytest.raises(ValueError, match=r'is not a readable image .*data.broken=skip'):
    opened(folder)
  for made in (True, False):  # then mapped
    capfd.readouterr()
    found = assert_as_decoded(folder, **{'data.broken': 'skip'})
    assert len(found) == IMAGES - 2 and len(found.skipped) == 2
    assert ('decoding' in capfd.readouterr().err) == made
  with pytest.raises(ValueError, match='is not a readable image'):
    opened(folder)


def test_unlabeled_broken_images_are_left_out(folder):
  (folder / 'flat').mkdir()
  for k in range(4):
    Image.fromarray(np.full((20, 20, 3), 60 * k, np.uint8)).save(folder / 'flat' / f'{k}.png')
  (folder / 'flat' / '2.png').write_bytes(b'no image')
  source = resolve.open_split(chosen(folder, **{'data.train_split': 'flat', 'data.broken': 'skip'}), 'train')
  found = cache.load(source, SIZE, str(folder.parent / 'new' / 'cache'))
  assert found.labels is None and found.items[:, 0, 0, 0].tolist() == [0, 60, 180]


def test_a_disk_without_room_and_a_folder_that_cannot_be_written_are_refused(folder, monkeypatch):
  with monkeypatch.context() as patched, pytest.raises(ValueError, match='GB free, and 24 images of 16 pixels need'):
    patched.setattr(cache.shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=IMAGES * 3 * SIZE**2 - 1))
    opened(folder)
  (folder.parent / 'file').write_text('')
  with pytest.raises(ValueError, match=r'data.cache = .* cannot be written \(.*\): give another folder'):
    opened(folder, **{'data.cache': str(folder.parent / 'file' / 'cache')})


@pytest.mark.skipif(not pathlib.Path('/dev/full').exists(), reason='no device that is always full')
def test_a_disk_that_fills_up_is_named(tmp_path):
  full, message = pathlib.Path('/dev/full'), r'/dev/full cannot be written \(No space left on device\): make room'
  with pytest.raises(ValueError, match=message) as error, cache._writing(full), full.open('wb', 0) as stream:
    stream.write(b'x')
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('code', [errno.EROFS, errno.EACCES])
def test_a_complete_file_in_a_read_only_folder_is_used(folder, monkeypatch, code):
  opened(folder)
  open_file = pathlib.Path.open

  def refuse(*_, **__):
    raise OSError(code, os.strerror(code))

  def read_only(path, mode='r'):
    return refuse() if set(mode) & set('aw+') else open_file(path, mode)

  monkeypatch.setattr(pathlib.Path, 'open', read_only)
  monkeypatch.setattr(pathlib.Path, 'unlink', refuse)
  positions = decoded(monkeypatch)
  assert_as_decoded(folder)
  assert len(positions) < 2 * IMAGES, 'a few are compared'
  replace(folder)
  with pytest.raises(ValueError, match=r'\.npy cannot be written \(.*\): give another folder as data\.cache$'):
    opened(folder)
  with pytest.raises(ValueError, match=r'\.lock cannot be written \(.*\): give another folder as data\.cache$'):
    opened(folder, **{'data.cache': str(folder.parent)})


def test_a_second_process_waits_for_the_first(folder, capfd):
  file = folder.parent / 'cache' / 'x.npy'
  file.parent.mkdir()
  passed = []

  def second():
    with cache._locked(file):
      passed.append(True)

  with cache._locked(file):
    waiting = threading.Thread(target=second)
    waiting.start()
    until = time.monotonic() + 60
    while 'waiting for it' not in capfd.readouterr().err:
      assert time.monotonic() < until
      time.sleep(0.01)
    assert not passed
  waiting.join(60)
  assert passed


def test_a_file_that_another_process_replaces_is_whole_again(folder, monkeypatch):
  """Without locks, another process may begin the file anew while this one still writes it."""
  monkeypatch.setattr(locks.fcntl, 'flock', raising(OSError('no locks here')))
  decode, calls = cache._Cache._decode, []

  def replaced(self, missing):
    decode(self, missing)
    calls.append(len(missing))
    if len(calls) == 1:
      self.file.unlink()
      np.lib.format.open_memmap(self.file, 'w+', np.uint8, self.shape).flush()

  monkeypatch.setattr(cache._Cache, '_decode', replaced)
  assert_as_decoded(folder)
  assert calls == [6, 6]


def raising(error):
  def function(*args):
    raise error

  return function


def test_the_spelling_of_the_path_does_not_matter(folder, monkeypatch):
  first = resolve.open_split(chosen(folder), 'train').fingerprint()
  monkeypatch.chdir(folder.parent)
  for path in ('images', './images', 'images/../images'):
    assert resolve.open_split(chosen(folder, **{'data.path': path}), 'train').fingerprint() == first
  monkeypatch.chdir(folder)
  assert resolve.open_split(chosen(folder, **{'data.path': '.'}), 'train').fingerprint() == first


def test_the_variant_of_imagenet100():
  made = imagenet100.get_config('dystress,on_device')
  config.validate(made, base.get_config())
  assert resolve.stored_size(made) == 256 and made.data.on_device == 'yes' and made.data.cache


@pytest.mark.slow
def test_a_run_on_mapped_images_is_the_run_on_decoded_ones(folder, tmp_path):
  given = {key: value for key, value in chosen(folder).data.items() if key in ('source', 'name', 'path')}
  given |= dict(image_size=12, stored_size=SIZE, on_device='yes', test_split='train', held_out=0.3)
  states = []
  for name, place in (('decoded', ''), ('made', tmp_path / 'cache'), ('mapped', tmp_path / 'cache')):
    made = tiny(tmp_path, data={**given, 'cache': str(place)}, batch_size=8, steps=4, **{'eval.k': (2,)})
    train.train(made, tmp_path / name)
    states.append(final(tmp_path / name, made))
  for losses, state in states[1:]:
    assert losses == states[0][0]
    chex.assert_trees_all_equal(state, states[0][1])
