"""Tar shards: what is read from them, broken samples, damaged and hostile files, and the order of an epoch."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ssl_jax.data import folder_source, npz, pipeline, shards, sources, tar_index, tar_source
from ssl_jax.evals import features
from tests.data.test_sources import fails


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """The user's cache is a folder of the test."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'ssl_jax'


def config(path, **changes):
  data = dict(source='tar', name='tiny', path=str(path), train_split='train-*.tar', test_split='test-*.tar')
  return {**data, 'classes': '', 'broken': 'error', **changes}


def pixels(seed, height=24, width=24):
  return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encode(image, fmt='PNG'):
  content = io.BytesIO()
  Image.fromarray(image).save(content, fmt)
  return content.getvalue()


def write(path, members, fmt=tarfile.PAX_FORMAT):
  """Writes a tar file with (name, content) or tarfile.TarInfo members."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(path, 'w', format=fmt) as archive:
    for member in members:
      if isinstance(member, tarfile.TarInfo):
        archive.addfile(member)
        continue
      name, content = member
      info = tarfile.TarInfo(name)
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return path


def sample(k, **fields):
  """The files of sample k: an image whose pixels are `pixels(k)`, and other fields by suffix."""
  key = f'{k:06}'
  return [(f'{key}.png', encode(pixels(k))), *((f'{key}.{suffix}', content) for suffix, content in fields.items())]


def pairs(tmp_path, shard_sizes=(4, 3, 5), **changes):
  """A source of three shards of samples with a caption and a label."""
  k = 0
  for shard, size in enumerate(shard_sizes):
    members = []
    for _ in range(size):
      members += sample(k, txt=f'caption {k}'.encode(), cls=str(k % 3).encode())
      k += 1
    write(tmp_path / f'train-{shard:04}.tar', members)
  return config(tmp_path, **changes)


def test_images_captions_and_labels(tmp_path):
  source = sources.load(pairs(tmp_path), 'train')
  assert len(source) == 12 and isinstance(source, tar_source.Tar)
  np.testing.assert_array_equal(source.labels, np.arange(12) % 3)
  np.testing.assert_array_equal(source.read(7), pixels(7))
  assert source.captions_of(np.array([7, 0])) == [('caption 7',), ('caption 0',)]
  images, labels = source.arrays(24)
  np.testing.assert_array_equal(images, [pixels(k) for k in range(12)])
  np.testing.assert_array_equal(labels, source.labels)
  part = source.subset(np.array([11, 2]))
  assert part.captions_of(np.arange(2)) == [('caption 11',), ('caption 2',)]
  assert part.where(0) == f'{tmp_path}/train-0002.tar: 000011.png'
  np.testing.assert_array_equal(source.blocks(), [0, 4, 7])


def test_captions_stay_with_their_images_in_memory(tmp_path):
  source = sources.load(pairs(tmp_path), 'train')
  assert source.in_memory(24).captions_of(np.array([3])) is None  # nobody needs them
  source.paired = True
  kept = source.in_memory(24).subset(np.array([5, 1]))
  np.testing.assert_array_equal(kept.items, [pixels(5), pixels(1)])
  assert kept.captions_of(np.arange(2)) == [('caption 5',), ('caption 1',)]


def test_fields_of_a_sample(tmp_path):
  json_of = lambda **fields: json.dumps(fields).encode()
  write(
    tmp_path / 'train-0.tar',
    [
      *sample(0, txt='one line\n\n  another, ü \n'.encode(), json=json_of(caption='ignored', label='dog')),
      *sample(1, json=json_of(caption='of the json', label='cat', width=8)),
      *sample(2, json=json_of(captions=['a', ' b ', ''], class_name='owl')),
      *sample(3, json=json_of(text='t'), cls=b'dog\n'),
      ('sub/folder/000001.png', encode(pixels(4))),  # another sample than 000001
      ('sub/folder/000001.txt', b'below'),
      ('sub/folder/000001.cls', b'cat'),
      ('notes.txt', b'without an image'),
      ('._000000.png', b'hidden'),
    ],
  )
  write(tmp_path / 'test-0.tar', sample(0, cls=b'ant'))
  source = sources.load(config(tmp_path), 'train')
  assert source.captions_of(np.arange(5)) == [
    ('one line', 'another, ü'),
    ('of the json',),
    ('a', 'b'),
    ('t',),
    ('below',),
  ]
  assert source.class_names == ('ant', 'cat', 'dog', 'owl')
  np.testing.assert_array_equal(source.labels, [2, 1, 3, 2, 1])
  np.testing.assert_array_equal(sources.load(config(tmp_path), 'test').labels, [0])


def test_a_set_without_text_or_labels(tmp_path, capsys):
  write(tmp_path / 'train-0.tar', [*sample(0), *sample(1)])
  source = sources.load(config(tmp_path), 'train')
  assert source.labels is None and source.captions_of(np.arange(2)) is None
  write(tmp_path / 'train-1.tar', sample(2, cls=b'7'))
  assert sources.load(config(tmp_path), 'train').labels is None
  assert '2 of 3 images have no label (first in train-0.tar): labels are not used' in capsys.readouterr().err


def test_images_whose_names_have_two_dots_are_counted(tmp_path, capsys):
  members = [*sample(0), ('000001.left.png', encode(pixels(1))), ('000001.right.png', encode(pixels(1)))]
  write(tmp_path / 'train-0.tar', [*members, ('000002.txt', b'no image')])
  for _ in range(2):  # scanned, then from the stored index
    folder_source.say_once.cache_clear()
    assert len(tar_source.load(config(tmp_path), 'train')) == 1
    assert '1 sample is not read (first in train-0.tar), because the image has another name' in capsys.readouterr().err


def test_negative_numbers_are_no_labels(tmp_path, capsys):
  write(tmp_path / 'train-0.tar', [*sample(0, cls=b'-1\n'), *sample(1, json=b'{"label": -1}')])
  source = sources.load(config(tmp_path), 'train')
  assert source.labels is None and source.captions_of(np.arange(2)) is None
  assert 'no label' not in capsys.readouterr().err


def test_numbers_of_classes_take_names_from_a_file(tmp_path):
  pairs(tmp_path)
  (tmp_path / 'classnames.txt').write_text('cat\ndog\nowl\n')
  assert sources.load(config(tmp_path), 'train').class_name(2) == 'owl'
  (tmp_path / 'classnames.txt').write_text('cat\ndog\n')
  fails(r'classnames\.txt has 2 names, but labels reach 2', config(tmp_path))


def test_numbers_of_classes_with_large_gaps_are_refused(tmp_path):
  for largest in (10**6, 10**30):
    write(tmp_path / 'train-0.tar', [*sample(0, cls=b'0'), *sample(1, cls=str(largest).encode())])
    fails(f'train_split: classes up to {largest:,}, but only 2 occur; number the classes from 0', config(tmp_path))


def test_splits_are_patterns(tmp_path):
  for name in ('train-0008', 'train-0009', 'train-0010', 'val/0', 'val/1', 'extra'):
    write(tmp_path / f'{name}.tar', sample(0))
  count = lambda split: len(sources.load(config(tmp_path, train_split=split), 'train').files)
  assert count('train-{0008..0010}.tar') == 3
  assert count('train-000?.tar') == 2
  assert count('{extra,val/0}.tar') == 2
  assert (count('train'), count('val'), count('extra')) == (3, 2, 1)
  write(tmp_path / 'data' / 'held-0.tar', sample(0))  # where repositories of Hugging Face have their files
  write(tmp_path / 'data' / 'train-0.tar', sample(0))
  assert (count('held'), count('train')) == (1, 3)
  fails(
    r"data\.train_split = 'train-\{0008\.\.0011\}\.tar' has no file 'train-0011\.tar' in .*: did you mean 'train-0010",
    config(tmp_path, train_split='train-{0008..0011}.tar'),
  )
  fails(r"data\.test_split = 'test' has no file 'test'", config(tmp_path, test_split='test'), 'test')
  fails('must have a range that ascends', config(tmp_path, train_split='train-{10..08}.tar'))
  fails("data.path = '' is not a folder", config(''))
  (tmp_path / 'empty').mkdir()
  fails(r'put \.tar files there', config(tmp_path / 'empty'))


def test_the_same_split_twice_holds_out_a_share(tmp_path):
  data = pairs(tmp_path, test_split='train-*.tar', held_out=0.25)
  train, test = (sources.load(data, split) for split in ('train', 'test'))
  assert len(train) + len(test) == 12 and len(test) == 3
  assert sources.same_images(train, test) == [] and len(sources.same_images(train, train)) == len(train)


@pytest.mark.parametrize('fmt', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_are_those_of_tarfile(tmp_path, fmt):
  long = 'x' * 60 + '/' + 'y' * 90 if fmt == tarfile.USTAR_FORMAT else 'folder ü/' * 20 + 'z' * 150
  folder, link = tarfile.TarInfo('folder'), tarfile.TarInfo('link.png')
  folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, '/etc/passwd'
  hard = tarfile.TarInfo('hard.png')
  hard.type, hard.linkname = tarfile.LNKTYPE, 'a.png'
  path = write(
    tmp_path / 'a.tar',
    [folder, ('a.png', b'1' * 511), link, (f'{long}.txt', b'2' * 513), hard, ('empty.txt', b''), ('b.png', b'3' * 512)],
    fmt,
  )
  with tarfile.open(path) as archive:
    expected = [(m.name, m.offset, m.offset_data, m.size) for m in archive if m.isreg()]
  with open(path, 'rb') as file:
    found = list(tar_index.members(file.fileno(), os.path.getsize(path)))
  assert [tuple(member) for member in found] == expected and len(found) == 4


def broken_pairs(tmp_path, **changes):
  """Five samples: the JPEG of 1 is truncated, 2 has no text, the text of 3 is not UTF-8; 0 and 4 are good."""
  members = []
  for k in range(5):
    image = encode(pixels(k, 64, 64), 'JPEG')
    members.append((f'{k}.jpg', image[: len(image) // 2] if k == 1 else image))
    if k != 2:
      members.append((f'{k}.txt', b'\xff\xfe caption' if k == 3 else f'caption {k}'.encode()))
  write(tmp_path / 'train-7.tar', members)
  return config(tmp_path, **changes)


def test_an_error_names_the_shard_and_the_key_of_a_broken_sample(tmp_path):
  source = sources.load(broken_pairs(tmp_path), 'train')
  source.read(3)  # as an image alone, it is good
  source.paired = True
  for k, reason in enumerate(
    ['is not a readable image (', 'has no readable text (it is missing or empty)', "has no readable text ('utf-8'"], 1
  ):
    for read in (source.read, lambda k: source.subset(np.array([k])).arrays(8)):
      with pytest.raises(ValueError) as error:
        read(k)
      text = str(error.value)
      assert text.startswith(f'{tmp_path}/train-7.tar: {k}.jpg {reason}') and '\n' not in text, text
      assert text.endswith(': fix or remove it, or set data.broken=skip')
  with pytest.raises(ValueError, match=r'train-7\.tar: 2\.jpg has no readable text'):
    source.captions_of(np.array([2]))


def test_half_of_a_surrogate_pair_is_not_readable_text(tmp_path):
  write(tmp_path / 'train-0.tar', [('0.png', encode(pixels(0))), ('0.json', rb'{"caption": "a \ud83d dog"}')])
  with pytest.raises(ValueError, match=r"train-0\.tar: 0\.png has no readable text \('utf-8'"):
    sources.load(config(tmp_path), 'train').captions_of(np.array([0]))


def test_an_image_of_another_format_is_not_parsed(tmp_path):
  write(tmp_path / 'train-0.tar', [('0.jpg', encode(pixels(0), 'EPS'))])
  with pytest.raises(ValueError, match=r'is not a readable image \(unknown format\)'):
    sources.load(config(tmp_path), 'train').read(0)


def test_broken_samples_are_skipped_and_counted(tmp_path):
  source = sources.load(broken_pairs(tmp_path, broken='skip'), 'train')
  source.paired = True
  found, position = source.first_readable(1, np.asarray)
  assert position == 4 and source.skipped == {1, 2, 3}
  np.testing.assert_array_equal(found, source.read(4))
  kept = source.in_memory(64)
  assert len(kept) == 2 and kept.captions_of(np.arange(2)) == [('caption 0',), ('caption 4',)]
  alone = sources.load(broken_pairs(tmp_path, broken='skip'), 'train')  # texts are not needed
  assert len(alone.in_memory(64)) == 4 and alone.skipped == {1}


@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_batch_counts_broken_samples(tmp_path, workers):
  source = sources.load(broken_pairs(tmp_path, broken='skip'), 'train')
  source.paired = True
  (batch,) = collect(source, batch_size=5, total_steps=1, num_workers=workers)
  assert set(batch['broken'][batch['broken'] >= 0].tolist()) == {1, 2, 3}
  assert set(batch['index'].tolist()) == {0, 4}


def damaged(tmp_path, how):
  whole = write(tmp_path / 'train-0.tar', [*sample(0), *sample(1), *sample(2)])
  content = bytearray(whole.read_bytes())
  with tarfile.open(whole) as archive:
    second = archive.getmember('000001.png')
  if how == 'cut':
    content = content[: second.offset_data + 100]
  elif how == 'cut between files':
    content = content[: second.offset]
  elif how == 'cut in padding':
    content = content[: second.offset_data + second.size + 1]
  elif how == 'header':
    content[second.offset + 10] ^= 1
  elif how == 'size':
    content[second.offset + 124 : second.offset + 136] = b'-0000000001\0'
  elif how == 'compressed':
    content = bytearray(b'\x1f\x8b' + content)
  whole.write_bytes(content)


@pytest.mark.parametrize(
  ('how', 'message', 'left'),
  [
    ('cut', r'ends within 000001\.png', 1),
    ('cut between files', 'has no block of zeros at its end', 1),
    ('cut in padding', 'has no block of zeros at its end', 2),
    ('header', 'has no valid header at byte', 1),
    ('size', 'has no valid header at byte', 1),
    ('compressed', 'is not a tar file, or is compressed', 0),
  ],
)
def test_a_damaged_shard(tmp_path, capsys, how, message, left):
  damaged(tmp_path, how)
  fails(rf'train-0\.tar {message}.*: copy it again, or set data\.broken=skip', config(tmp_path))
  if left:
    assert len(sources.load(config(tmp_path, broken='skip'), 'train')) == left
    assert re.search(rf'{message}.*: the {left} images before that are used', capsys.readouterr().err)
  else:
    fails(r'has no images \(KEY\.jpg', config(tmp_path, broken='skip'))


def header(name, size, kind=b'0'):
  """A ustar header, with a valid checksum whatever the size claims."""
  block = bytearray(512)
  block[: len(name)] = name
  block[124:136] = size
  block[156:157] = kind
  block[257:265] = b'ustar\x0000'
  block[148:156] = b'%06o\0 ' % (sum(block) + 8 * 32)
  return bytes(block)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (header(b'a.png', b'\x80' + (2**60).to_bytes(11, 'big')), r'ends within a\.png'),
    (header(b'a.png', b'\xff' * 12), 'is not a tar file'),  # negative: tarfile would read it forever
    (header(b'a', b'77777777777\0', b'L'), 'has a header of 8,589,934,591 bytes'),
    (header(b'a', b'00000000010\0', b'x') + b'9 path=x'.ljust(512, b'\0'), 'has a damaged extended header'),
    (header(b'a', b'00000000000\0', b'S'), 'has a sparse file'),
    (header(b'a.png', b'00000000001\0'), r'ends within a\.png'),
    (header(b'a.png', b'00000000000\0')[:100], 'is not a tar file'),
  ],
)
def test_a_hostile_shard(tmp_path, content, message):
  (tmp_path / 'train-0.tar').write_bytes(content)
  fails(message, config(tmp_path))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * 512 - 1), st.integers(0, 255)), max_size=6), st.integers(0, 5 * 512))
def test_a_changed_or_shortened_shard_has_members_within_it_or_a_reason(changes, length):
  content = bytearray(
    header(b'a.png', b'00000000003\0') + b'abc'.ljust(512, b'\0') + header(b'b.txt', b'00000000001\0')
  )
  content += b'd'.ljust(512, b'\0') + bytes(1024)
  for place, value in changes:
    content[place] = value
  for start in (0, 1024):  # with checksums that are right, or nothing would get past them
    content[start + 148 : start + 156] = b'%06o\0 ' % (
      sum(content[start : start + 148]) + sum(content[start + 156 : start + 512]) + 256
    )
  with tempfile.TemporaryFile() as file:
    file.write(content[:length])
    file.flush()
    try:
      for member in tar_index.members(file.fileno(), length):
        assert 0 <= member.head < member.offset <= member.offset + member.size <= length
    except ValueError as error:
      assert '\n' not in str(error)


def test_only_regular_files_are_shards(tmp_path):
  (tmp_path / 'train-0.tar').mkdir()
  os.mkfifo(tmp_path / 'train-1.tar')
  fails("has no file 'train-", config(tmp_path))


def test_the_index_is_stored_and_renewed_when_the_shard_changes(tmp_path, monkeypatch, capsys):
  data = pairs(tmp_path)
  first = sources.load(data, 'train')
  assert 'scanning 3 shards, once' in capsys.readouterr().err
  assert sorted(file.name for file in (tmp_path / '.index').iterdir()) == [f'train-000{k}.tar.npz' for k in range(3)]
  with monkeypatch.context() as patched:
    patched.setattr(tar_index, 'scan', lambda shard: pytest.fail('scanned again'))
    again = sources.load(data, 'train')
  np.testing.assert_array_equal(again.items, first.items)
  np.testing.assert_array_equal(again.labels, first.labels)
  assert not capsys.readouterr().err
  write(tmp_path / 'train-0001.tar', sample(40, cls=b'0'))
  assert len(sources.load(data, 'train')) == 10
  with pytest.raises(ValueError, match='the shard has changed since the run began'):
    first.subset(np.array([4])).read(0)
  (tmp_path / '.index' / 'train-0000.tar.npz').write_bytes(b'damaged')
  np.testing.assert_array_equal(sources.load(data, 'train').read(0), pixels(0))
  np.savez(tmp_path / '.index' / 'train-0000.tar.npz', items=first.items)  # without a stamp
  np.testing.assert_array_equal(sources.load(data, 'train').read(0), pixels(0))


def test_where_shards_cannot_be_written_beside_the_index_is_in_the_cache(tmp_path, cache, capsys):
  data = pairs(tmp_path / 'data')
  (tmp_path / 'data' / '.index').write_text('no folder')  # root may write everywhere, so permissions prove nothing
  sources.load(data, 'train')
  assert len(list(cache.glob('*.npz'))) == 3 and not list(cache.glob('*.part'))
  capsys.readouterr()
  sources.load(data, 'train')
  assert not capsys.readouterr().err


def test_a_worker_gets_a_copy_that_opens_the_shards_itself(tmp_path):
  source = pickle.loads(pickle.dumps(sources.load(pairs(tmp_path), 'train')))
  np.testing.assert_array_equal(source.read(5), pixels(5))
  assert source.captions_of(np.array([5])) == [('caption 5',)]


# The order of an epoch


def collect(source, **changes):
  chosen = dict(seed=3, batch_size=4, total_steps=7, crops=[pipeline.Crop(8)] * 2) | changes
  with contextlib.closing(pipeline.batches(source, **chosen)) as iterator:
    return [{**batch, 'images': np.array(batch['images'][0])} for batch in iterator]


def assert_same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    for key in ('images', 'index', 'broken'):
      np.testing.assert_array_equal(a[key], b[key])


def test_a_window_shuffles_blocks_and_the_images_of_a_few_of_them():
  blocks = (0, 10, 15, 40, 60, 90)
  found = pipeline.order(1, 0, 100, 30, blocks)
  np.testing.assert_array_equal(np.sort(found), np.arange(100))
  assert not np.array_equal(found, pipeline.order(1, 1, 100, 30, blocks))
  assert not np.array_equal(found, pipeline.order(2, 0, 100, 30, blocks))
  block_of = np.searchsorted(blocks, found, side='right') - 1
  seen, windows = 0, []
  while seen < 100:  # the blocks of a window are not mixed with others
    window, size = set(), 0
    while size < 30 and seen + size < 100:
      window |= set(block_of[seen : seen + size + 1].tolist())
      size = sum(np.diff((*blocks, 100))[k] for k in window)
    assert set(block_of[seen : seen + size].tolist()) == window
    windows.append(window)
    seen += size
  assert len(windows) > 1 and any(len(window) > 1 for window in windows)
  assert (np.abs(np.diff(found)) != 1).mean() > 0.8  # shuffled within the blocks, too
  assert pipeline.order(1, 0, 20, 30, (0,)).tolist() != list(range(20))  # also if they are fewer than a window
  np.testing.assert_array_equal(pipeline.order(1, 0, 100), np.random.default_rng((1, 0)).permutation(100))


@pytest.mark.parametrize(('window', 'workers'), [(0, 0), (5, 0), pytest.param(5, 2, marks=pytest.mark.slow)])
def test_an_epoch_resumes_within_a_shard_with_other_workers(tmp_path, window, workers):
  source = sources.load(pairs(tmp_path, (7, 6, 9), shuffle_window=window), 'train')
  whole = collect(source)
  visited = np.concatenate([batch['index'] for batch in whole])
  order = lambda epoch: pipeline.order(3, epoch, 22, window, (0, 7, 13))
  np.testing.assert_array_equal(visited, np.concatenate([order(0)[:20], order(1)[:8]]))
  assert_same(collect(source, start_step=2, num_workers=workers), whole[2:])
  if not workers:
    assert_same(collect(source, start_step=6), whole[6:])


@pytest.mark.parametrize('window', [0, 5])
def test_processes_share_the_batches(tmp_path, window):
  source = sources.load(pairs(tmp_path, (7, 6, 9), shuffle_window=window), 'train')
  parts = [collect(source, process_index=k, process_count=2) for k in range(2)]
  joined = [{key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*parts, strict=True)]
  assert_same(joined, collect(source))


def test_threads_may_open_and_close_shards_at_the_same_time(tmp_path, monkeypatch):
  """Two threads that open the same shard keep one of the two; the other must not be closed while it is read."""
  monkeypatch.setattr(tar_source, '_opened', functools.lru_cache(maxsize=1)(tar_source._Opened))
  source = sources.load(pairs(tmp_path), 'train')
  with ThreadPoolExecutor(8) as pool:
    for k, image in zip(list(range(12)) * 20, pool.map(source.read, list(range(12)) * 20), strict=True):
      np.testing.assert_array_equal(image, pixels(k))


def test_braces():
  assert list(shards.expand('a-{1..3}')) == ['a-1', 'a-2', 'a-3']
  assert list(shards.expand('{000..001}/{x,y}.tar')) == ['000/x.tar', '000/y.tar', '001/x.tar', '001/y.tar']
  assert list(shards.expand('plain')) == ['plain'] and list(shards.expand('{9..10}')) == ['9', '10']
  with pytest.raises(ValueError, match='at most 1,000,000 numbers'):
    list(shards.expand('{0..99999999}'))


def test_stored_features_depend_on_the_places_in_the_shards(tmp_path):
  source = sources.load(pairs(tmp_path), 'train')
  digest = lambda positions: features.digest({}, {}, source.subset(np.array(positions)))
  assert digest([0, 3]) == digest([0, 3]) != digest([0, 6])


def test_threads_parse_headers_one_at_a_time(tmp_path, monkeypatch):
  np.savez(tmp_path / 'index.npz', a=np.arange(3), b=np.arange(4))
  active, seen = [], []

  def check(archive, name):
    active.append(name)
    time.sleep(0.002)  # lets other threads run
    seen.append(len(active))
    active.pop()

  monkeypatch.setattr(npz, '_check_header', check)
  with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: npz.read_npz(tmp_path / 'index.npz', 'ab'), range(8)))
  assert seen == [1] * 16
  assert all(arrays['b'].tolist() == [0, 1, 2, 3] for arrays in found)
