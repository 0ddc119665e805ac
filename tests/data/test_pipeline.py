import collections
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from ssl_jax.data import image_ops, pipeline, sources
from tests.helpers import REAL, needs_real_data


def coordinates(k, height=60, width=80):
  """An image with channels (column, row, k), so that a crop shows its position."""
  rows, columns = np.mgrid[:height, :width].astype(np.uint8)
  return np.stack([columns, rows, np.full_like(rows, k)], -1)


def source(n=10):
  return sources.Arrays(np.stack([coordinates(k) for k in range(n)]))


CROP = pipeline.Crop(16)


def single(groups):
  (images,) = groups
  return np.array(images)


def collect(data, **settings):
  """The batches, with views of one size."""
  settings = dict(seed=3, batch_size=4, total_steps=5, crops=[CROP] * 2) | settings
  with contextlib.closing(pipeline.batches(data, **settings)) as iterator:
    return [{**batch, 'images': single(batch['images'])} for batch in iterator]


def assert_same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      np.testing.assert_array_equal(a[key], b[key])


def test_order_is_a_permutation_of_seed_and_epoch():
  first = pipeline.order(0, 0, 100)
  assert first.dtype == np.int64
  np.testing.assert_array_equal(np.sort(first), np.arange(100))
  np.testing.assert_array_equal(first, np.random.default_rng(np.random.SeedSequence((0, 0))).permutation(100))
  assert not np.array_equal(first, pipeline.order(0, 1, 100))
  assert not np.array_equal(first, pipeline.order(1, 0, 100))
  assert not np.array_equal(pipeline.order(0, 1, 100), pipeline.order(1, 0, 100))
  assert not first.flags.writeable  # it is cached


def test_an_epoch_visits_images_in_order_and_drops_the_last_few():
  batches = collect(source(10))  # two full batches of 4 per epoch: 5 steps are two epochs and a half
  visited = np.concatenate([batch['index'] for batch in batches])
  expected = np.concatenate([pipeline.order(3, epoch, 10)[:8] for epoch in range(3)])[:20]
  np.testing.assert_array_equal(visited, expected)
  for batch in batches:
    assert batch['images'].shape == (4, 2, 16, 16, 3) and batch['images'].dtype == np.uint8
    assert batch['index'].dtype == np.int32 and (batch['broken'] == -1).all()
    np.testing.assert_array_equal(
      batch['images'][..., 2], np.broadcast_to(batch['index'][:, None, None, None], (4, 2, 16, 16))
    )


def test_crops_are_the_sampled_boxes_resized_by_pillow():
  batch = collect(source(), total_steps=2, crops=[CROP] * 3)[1]
  for slot in range(4):
    rng = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(1, slot)))
    for view, uniforms in enumerate(rng.random((3, image_ops.CROP_DRAWS))):
      top, left, height, width = (int(x) for x in image_ops.sample_crop(uniforms, 60, 80))
      image = Image.fromarray(coordinates(batch['index'][slot]))
      expected = image.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BILINEAR)
      np.testing.assert_array_equal(batch['images'][slot, view], np.asarray(expected))


def test_crops_have_the_requested_area_and_ratio():
  batches = collect(source(), total_steps=40, batch_size=8, crops=2 * [pipeline.Crop(16, (0.2, 0.5), (0.5, 2.0))])
  images = np.concatenate([batch['images'] for batch in batches]).reshape(-1, 16, 16, 3).astype(float)
  # A column is the mean of width / 16 columns of the image: from the first to the last it covers 15/16 of the width.
  width = (images[:, 8, -1, 0] - images[:, 8, 0, 0]) * 16 / 15
  height = (images[:, -1, 8, 1] - images[:, 0, 8, 1]) * 16 / 15
  area, ratio = width * height / (60 * 80), width / height
  assert 0.17 < area.min() < 0.25 and 0.45 < area.max() < 0.55
  assert 0.45 < ratio.min() < 0.65 and 1.55 < ratio.max() < 2.2
  assert abs(area.mean() - 0.35) < 0.02
  views = images.reshape(-1, 2, 16, 16, 3)
  assert (views[:, 0] != views[:, 1]).any((1, 2, 3)).all()


def test_the_whole_image_is_a_crop_too():
  data = sources.Arrays(np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8))
  batch = collect(data, total_steps=1, crops=[pipeline.Crop(16, (1.0, 1.0), (1.0, 1.0)), pipeline.Crop(16, None)])[0]
  for view in range(2):
    np.testing.assert_array_equal(batch['images'][:, view], data.items[batch['index']])


def test_each_view_has_its_own_crop():
  small = pipeline.Crop(16, (0.05, 0.05), (1.0, 1.0), 'bicubic')
  batch = collect(
    source(), total_steps=1, crops=[pipeline.Crop(16, (1.0, 1.0), (4 / 3, 4 / 3)), small, CROP._replace(scale=None)]
  )[0]
  width = (batch['images'][:, :, 8, -1, 0].astype(float) - batch['images'][:, :, 8, 0, 0]) * 16 / 15
  np.testing.assert_allclose(width, np.broadcast_to([80, np.sqrt(0.05 * 60 * 80), 60], (4, 3)), atol=2.5)
  rng = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(0, 0)))
  uniforms = rng.random((3, image_ops.CROP_DRAWS))[1]
  top, left, height, width = (int(x) for x in image_ops.sample_crop(uniforms, 60, 80, small.scale, small.ratio))
  part = Image.fromarray(coordinates(batch['index'][0])).crop((left, top, left + width, top + height))
  np.testing.assert_array_equal(batch['images'][0, 1], part.resize((16, 16), Image.Resampling.BICUBIC))


def test_a_run_resumes_at_any_step():
  whole = collect(source())
  for start in (1, 2, 4):
    assert_same(collect(source(), start_step=start), whole[start:])
  assert collect(source(), start_step=5) == []


def test_another_seed_gives_other_images_and_other_crops():
  a, b = collect(source(4))[0], collect(source(4), seed=4)[0]
  assert not np.array_equal(a['index'], b['index'])
  a, b = a['images'][np.argsort(a['index'])], b['images'][np.argsort(b['index'])]
  assert (a != b).any((1, 2, 3, 4)).all()


def test_processes_share_the_global_batch():
  whole = collect(source(20), batch_size=8)
  parts = [collect(source(20), batch_size=8, process_index=p, process_count=2) for p in range(2)]
  joined = [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*parts, strict=True)]
  assert_same(joined, whole)


@pytest.mark.slow
def test_workers_give_the_same_batches_and_a_device_accepts_them():
  data = source()
  with contextlib.closing(
    pipeline.batches(data, seed=3, batch_size=4, total_steps=7, crops=[CROP] * 2, num_workers=2)
  ) as iterator:
    put = lambda batch: jax.device_put({key: batch[key] for key in ('images', 'index')})
    on_device = list(pipeline.prefetch(iterator, put))
  # Read back only now: the shared memory of the first batches must not have been released.
  for batch, expected in zip(on_device, collect(data, total_steps=7), strict=True):
    np.testing.assert_array_equal(single(batch['images']), expected['images'])
    np.testing.assert_array_equal(np.asarray(batch['index']), expected['index'])


def folder(tmp_path, n=6):
  for k in range(n):
    (tmp_path / 'train').mkdir(exist_ok=True)
    Image.fromarray(coordinates(40 * k)).save(tmp_path / f'train/{k}.png')
  return dict(source='folder', path=str(tmp_path), train_split='train', test_split='test', classes='', broken='error')


def test_a_broken_image_is_replaced_by_the_next(tmp_path):
  data = folder(tmp_path)
  whole = collect(sources.load(data, 'train'), batch_size=6, total_steps=1)[0]
  path = tmp_path / 'train/2.png'
  path.write_bytes(path.read_bytes()[:-60])
  batch = collect(sources.load(data | dict(broken='skip'), 'train'), batch_size=6, total_steps=1)[0]
  np.testing.assert_array_equal(batch['broken'], np.where(whole['index'] == 2, 2, -1))
  np.testing.assert_array_equal(batch['index'], np.where(whole['index'] == 2, 3, whole['index']))
  good = batch['broken'] < 0
  np.testing.assert_array_equal(batch['images'][good], whole['images'][good])
  assert (batch['images'][~good][..., 2] == 120).all()  # the third channel of image 3


@pytest.mark.parametrize('workers', [0, 1])
def test_the_error_of_a_worker_reaches_the_caller(tmp_path, workers):
  data = folder(tmp_path)
  (tmp_path / 'train/2.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match=r'train/2\.png is not a readable image .*data\.broken=skip'):
    collect(sources.load(data, 'train'), batch_size=6, num_workers=workers)
  assert not multiprocessing.active_children()


def test_the_error_of_a_killed_worker_has_a_fix():
  settings = dict(seed=3, batch_size=4, total_steps=100, crops=[CROP], num_workers=1)
  with contextlib.closing(pipeline.batches(source(), **settings)) as iterator:
    next(iterator)
    for worker in multiprocessing.active_children():
      worker.kill()
    with pytest.raises(
      ValueError, match=r'^a worker of data\.workers was killed, .*: lower data\.workers, or set it to 0$'
    ):
      collections.deque(iterator, maxlen=0)


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size_and_is_close(tmp_path, monkeypatch):
  smooth = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
  (tmp_path / 'train').mkdir()
  Image.fromarray(smooth).resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / 'train/a.jpg', quality=95)
  data = dict(source='folder', path=str(tmp_path), train_split='train', test_split='test', classes='', broken='error')
  asked, draft = [], JpegImagePlugin.JpegImageFile.draft

  def crops(size, decode):
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, 'draft', decode)
    settings = dict(batch_size=1, total_steps=1, crops=4 * [pipeline.Crop(size)])
    return collect(sources.load(data, 'train'), **settings)[0]['images'].astype(int)

  def recorded(image, *arguments):
    draft(image, *arguments)
    asked.append(image.size)

  fast = crops(32, recorded)
  assert len(asked) == 1 and asked[0][0] in (800, 400, 200)
  slow = crops(32, lambda image, *_: None)
  assert 0 < abs(fast - slow).mean() < 1.5
  crops(700, recorded)
  assert len(asked) == 1  # a view of 700 pixels needs them all


def test_impossible_batches_are_rejected(monkeypatch):
  with pytest.raises(ValueError, match='batch_size = 11 must be from 1 to the 10 images of the data'):
    collect(source(10), batch_size=11)
  with pytest.raises(ValueError, match='batch_size = 4 must be divisible by the 3 processes'):
    collect(source(10), process_count=3)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=2 * 3 * 4 * 2 * 3 * 16**2 - 1))
  with pytest.raises(ValueError, match=r'data\.workers = 2 needs .* of /dev/shm, which has less: .*--shm-size'):
    collect(source(10), num_workers=2)


def test_prefetch_runs_ahead_by_its_depth():
  put = []
  iterator = pipeline.prefetch(iter(range(5)), lambda batch: put.append(batch) or -batch, depth=2)
  for k, ahead in enumerate([3, 4, 5, 5, 5]):
    assert next(iterator) == -k
    assert len(put) == ahead
  assert list(iterator) == []
  assert list(pipeline.prefetch(iter([1]), lambda batch: batch, depth=2)) == [1]


SCRIPT = """
import contextlib, signal, sys, time
from absl import app
import numpy as np
from ssl_jax.data import pipeline, sources

def main(argv):
  data = sources.Arrays(np.zeros((8, 32, 32, 3), np.uint8))
  settings = dict(seed=0, batch_size=4, total_steps=10**6, crops=[pipeline.Crop(16)] * 2, num_workers=2)
  with contextlib.closing(pipeline.batches(data, **settings)) as iterator:
    next(iterator), next(iterator)
    print('ready', flush=True)
    for _ in iterator:
      time.sleep(0.01)
      if interrupted:  # not raised by the handler: inside a __del__ it would be ignored
        raise KeyboardInterrupt

if __name__ == '__main__':
  signal.signal(signal.SIGTERM, lambda *_: print('asked to stop', flush=True))
  interrupted = []
  signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
  app.run(main)
"""


def alive(group):
  """Whether a process of the group is still running."""
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  return True


@pytest.mark.slow
@pytest.mark.parametrize('how', ['interrupted', 'killed'])
def test_no_worker_outlives_a_script(tmp_path, how):
  script = tmp_path / 'script.py'
  script.write_text(SCRIPT)
  environment = os.environ | dict(PYTHONPATH=str(pathlib.Path(pipeline.__file__).parents[2]), PYTHONWARNINGS='error')
  with subprocess.Popen(
    [sys.executable, script],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment,
    start_new_session=True,
  ) as process:
    try:
      assert process.stdout.readline() == 'ready\n', process.stderr.read()
      if how == 'interrupted':
        os.killpg(process.pid, signal.SIGTERM)  # as schedulers do, to let the parent save
        assert process.stdout.readline() == 'asked to stop\n'
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: parent and workers alike
      else:
        process.kill()
      _, errors = process.communicate(timeout=60)
      deadline = time.monotonic() + 15
      while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
      assert not alive(process.pid)
      if how == 'interrupted':
        assert errors.count('Traceback') == 1 and errors.rstrip().endswith('KeyboardInterrupt')
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@needs_real_data
def test_photographs_of_many_shapes():
  data = dict(
    source='folder', path=f'{REAL}/imagewoof', train_split='train', test_split='val', classes='', broken='error'
  )
  data = sources.load(data, 'train')
  batches = collect(data, batch_size=50, total_steps=4, crops=[pipeline.Crop(96)] * 2)
  assert np.array_equal(np.sort(np.concatenate([batch['index'] for batch in batches])), np.arange(200))
  # The mean colors of two views of one photograph differ less than those of two photographs.
  color = np.concatenate([batch['images'].mean((2, 3)) for batch in batches])
  same = np.linalg.norm(color[:, 0] - color[:, 1], axis=-1).mean()
  other = np.linalg.norm(color[:, 0] - np.roll(color[:, 1], 1, 0), axis=-1).mean()
  assert same < 0.6 * other
