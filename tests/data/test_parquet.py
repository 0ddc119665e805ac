"""Parquet files as Hugging Face datasets are stored: columns, broken rows, and reading by row groups."""

import json
import pickle
import sys

import numpy as np
import pytest

from ssl_jax.data import parquet_source, pipeline, sources
from tests.data.test_tar import assert_same, collect, encode, fails, pixels

pa = pytest.importorskip('pyarrow')
pq = pytest.importorskip('pyarrow.parquet')


@pytest.fixture(autouse=True)
def nothing_kept():
  parquet_source._GROUPS.clear()
  yield
  parquet_source._GROUPS.clear()


def config(path, **changes):
  data = dict(source='parquet', name='tiny', path=str(path), train_split='train', test_split='test', columns='')
  return {**data, 'classes': '', 'broken': 'error', **changes}


def images(numbers):
  return [{'bytes': encode(pixels(k)), 'path': f'{k}.png'} for k in numbers]


def write(path, columns, rows_per_group=4, features=None):
  path.parent.mkdir(parents=True, exist_ok=True)
  table = pa.table(columns)
  if features:
    info = json.dumps({'info': {'features': features}})
    table = table.replace_schema_metadata({'huggingface': info})
  pq.write_table(table, path, row_group_size=rows_per_group)
  return path


def pairs(tmp_path, sizes=(7, 6, 9), **changes):
  """Files of some images each, with a caption and a label, in row groups of four."""
  first = 0
  for file, size in enumerate(sizes):
    numbers = range(first, first + size)
    write(
      tmp_path / f'train-{file:05}-of-{len(sizes):05}.parquet',
      {'image': images(numbers), 'caption': [f'caption {k}' for k in numbers], 'label': [k % 3 for k in numbers]},
      features={'label': {'names': ['cat', 'dog', 'owl'], '_type': 'ClassLabel'}},
    )
    first += size
  return config(tmp_path, **changes)


def test_images_captions_and_labels(tmp_path):
  source = sources.load(pairs(tmp_path), 'train')
  assert len(source) == 22 and source.class_name(2) == 'owl'
  np.testing.assert_array_equal(source.labels, np.arange(22) % 3)
  for k in (0, 6, 7, 21):
    np.testing.assert_array_equal(source.read(k), pixels(k))
  assert source.captions_of(np.array([21, 5])) == [('caption 21',), ('caption 5',)]
  np.testing.assert_array_equal(source.arrays(24)[0], [pixels(k) for k in range(22)])
  np.testing.assert_array_equal(source.blocks(), [0, 4, 7, 11, 13, 17, 21])
  assert source.where(12) == f'{tmp_path}/train-00001-of-00003.parquet: row 5'
  part = source.subset(np.array([21, 5]))
  np.testing.assert_array_equal(part.read(0), pixels(21))
  copy = pickle.loads(pickle.dumps(source))
  np.testing.assert_array_equal(copy.read(13), pixels(13))


def test_columns_are_found_by_name_and_type_or_given(tmp_path):
  numbers = range(3)
  plain = [encode(pixels(k)) for k in numbers]
  write(
    tmp_path / 'train.parquet',
    {
      'url': ['http://nowhere'] * 3,
      'picture': plain,
      'text': pa.array([['a', ' b '], ['c'], []]),
      'kind': ['dog', 'cat', 'dog'],
    },
  )
  source = sources.load(config(tmp_path), 'train')  # the only column of bytes
  np.testing.assert_array_equal(source.read(2), pixels(2))
  assert source.labels is None and source.captions_of(np.array([0])) == [('a', 'b')]
  source = sources.load(config(tmp_path, columns='picture,url,kind'), 'train')
  np.testing.assert_array_equal(source.labels, [1, 0, 1])
  assert source.class_names == ('cat', 'dog') and source.captions_of(np.array([0])) == [('http://nowhere',)]
  source = sources.load(config(tmp_path, columns='picture'), 'train')
  assert source.labels is None and source.captions_of(np.array([0])) is None
  fails(
    r"columns = 'pictures'.* has no column 'pictures': did you mean 'picture'", config(tmp_path, columns='pictures')
  )
  fails("column 'url' is of type string, which does not fit the image: name another", config(tmp_path, columns='url'))
  fails('must name the image, text and label', config(tmp_path, columns=',text'))
  write(tmp_path / 'test.parquet', {'a': plain, 'b': plain})
  fails('has no column named image with images as bytes, only a, b: name it', config(tmp_path), 'test')


def test_files_with_other_types_are_refused(tmp_path):
  plain = [encode(pixels(k)) for k in range(3)]
  write(tmp_path / 'train-0.parquet', {'image': plain, 'label': [0, 1, 2]})
  write(tmp_path / 'train-1.parquet', {'image': ['a', 'b', 'c'], 'label': [0, 1, 2]})
  fails(r"train-1\.parquet: column 'image' is of type string, which does not fit the image", config(tmp_path))
  write(tmp_path / 'train-1.parquet', {'image': plain, 'label': ['cat', 'dog', 'owl']})
  fails("column 'label' of data.train_split has numbers and strings: use one type", config(tmp_path))
  twice = pa.table([plain, [0, 1, 2], [0, 1, 2]], names=['image', 'label', 'label'])
  pq.write_table(twice, tmp_path / 'train-1.parquet')
  fails(r"train-1\.parquet has several columns 'label': give each its own name", config(tmp_path))


def test_categories_are_labels_and_other_types_are_named(tmp_path, capsys):
  plain = [encode(pixels(k)) for k in range(3)]
  write(tmp_path / 'train.parquet', {'image': plain, 'label': pa.array(['cat', 'dog', 'cat']).dictionary_encode()})
  source = sources.load(config(tmp_path), 'train')
  assert source.labels.tolist() == [0, 1, 0] and source.class_names == ('cat', 'dog')
  write(tmp_path / 'train.parquet', {'image': plain, 'label': [0.0, 1.0, 2.0]})
  assert sources.load(config(tmp_path), 'train').labels is None
  assert "column 'label' is of type double: labels are not used" in capsys.readouterr().err


def test_class_numbers_with_large_gaps_or_without_a_name_are_refused(tmp_path):
  for largest in (100_000, 2**40):
    write(tmp_path / 'train.parquet', {'image': images(range(2)), 'label': [0, largest]})
    fails(f'train_split: classes up to {largest:,}, but only 2 occur; number the classes from 0', config(tmp_path))
  named = {'label': {'names': ['cat', 'dog'], '_type': 'ClassLabel'}}
  write(tmp_path / 'train.parquet', {'image': images(range(2)), 'label': [0, 2]}, features=named)
  fails("column 'label' of data.train_split has label 2, but 2 class names: ", config(tmp_path))


def test_class_names_are_those_of_both_splits(tmp_path):
  write(tmp_path / 'train.parquet', {'image': images(range(2)), 'label': ['dog', 'owl']})
  write(tmp_path / 'test.parquet', {'image': images(range(2)), 'label': ['cat', 'dog']})
  np.testing.assert_array_equal(sources.load(config(tmp_path), 'train').labels, [1, 2])
  np.testing.assert_array_equal(sources.load(config(tmp_path), 'test').labels, [0, 1])


def test_an_unlabeled_split_has_no_labels(tmp_path, capsys):
  write(tmp_path / 'train.parquet', {'image': images(range(3)), 'label': [-1, -1, -1]})
  assert sources.load(config(tmp_path), 'train').labels is None
  write(tmp_path / 'train.parquet', {'image': images(range(3)), 'label': [1, None, 0]})
  assert sources.load(config(tmp_path), 'train').labels is None
  assert '1 of 3 images have no label' in capsys.readouterr().err


def broken(tmp_path, **changes):
  """Rows 1 to 4 are broken: a truncated JPEG, no bytes, no text, a text that is not UTF-8."""
  contents = [encode(pixels(k, 64, 64), 'JPEG') for k in range(6)]
  contents[1] = contents[1][: len(contents[1]) // 2]
  stored = [{'bytes': content, 'path': '/etc/passwd'} for content in contents]
  stored[2]['bytes'] = None
  texts = [f'caption {k}'.encode() for k in range(6)]
  texts[3], texts[4] = None, b'\xff\xfe'
  text = pa.Array.from_buffers(pa.string(), 6, pa.array(texts, pa.binary()).buffers())
  write(tmp_path / 'train.parquet', {'image': stored, 'text': text})
  return config(tmp_path, **changes)


def test_an_error_names_the_file_and_the_row(tmp_path):
  source = sources.load(broken(tmp_path), 'train')
  source.read(4)  # as an image alone, it is good
  source.paired = True
  reasons = {1: 'is not a readable image (', 2: 'is not a readable image (it has no bytes)'}
  reasons |= {3: 'has no readable text (it is missing or empty)', 4: "has no readable text ('utf-8'"}
  for k, reason in reasons.items():
    with pytest.raises(ValueError) as error:
      source.read(k)
    assert str(error.value).startswith(f'{tmp_path}/train.parquet: row {k} {reason}'), error.value
    assert '\n' not in str(error.value)


def test_broken_rows_are_skipped_and_counted(tmp_path):
  source = sources.load(broken(tmp_path, broken='skip'), 'train')
  source.paired = True
  assert source.first_readable(1, np.asarray)[1] == 5
  kept = source.in_memory(64)
  assert kept.captions_of(np.arange(2)) == [('caption 0',), ('caption 5',)] and source.skipped == {1, 2, 3, 4}


def test_an_image_of_another_format_is_not_parsed(tmp_path):
  write(tmp_path / 'train.parquet', {'image': [encode(pixels(0), 'EPS')]})
  with pytest.raises(ValueError, match=r'is not a readable image \(unknown format\)'):
    sources.load(config(tmp_path), 'train').read(0)


def test_damaged_labels_name_the_file(tmp_path):
  file = write(tmp_path / 'train.parquet', {'image': images(range(4)), 'label': [0, 1, 0, 1]})
  column = pq.ParquetFile(file).metadata.row_group(0).column(2)
  assert column.path_in_schema == 'label'
  start = column.dictionary_page_offset
  content = bytearray(file.read_bytes())
  content[start : start + column.total_compressed_size] = b'\xff' * column.total_compressed_size
  file.write_bytes(content)
  fails(r"train\.parquet: column 'label' cannot be read \(.*\): copy it again", config(tmp_path))


def test_damaged_files_and_a_missing_package(tmp_path, monkeypatch):
  file = pairs(tmp_path) and tmp_path / 'train-00001-of-00003.parquet'
  file.write_bytes(file.read_bytes()[:-10])
  fails(r'train-00001-of-00003\.parquet is not a Parquet file \(.*\): copy it again', config(tmp_path))
  write(file, {'image': images(range(2))})
  fails("has no column 'caption': it has image", config(tmp_path))
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  fails(r"data.source = 'parquet' needs pyarrow: pip install -e '\.\[parquet\]'", config(tmp_path))


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_epoch_resumes_within_a_row_group_with_other_workers(tmp_path, workers):
  source = sources.load(pairs(tmp_path, shuffle_window=6), 'train')
  whole = collect(source)
  order = lambda epoch: pipeline.order(3, epoch, 22, 6, (0, 4, 7, 11, 13, 17, 21))
  visited = np.concatenate([batch['index'] for batch in whole])
  np.testing.assert_array_equal(visited, np.concatenate([order(0)[:20], order(1)[:8]]))
  assert_same(collect(source, start_step=2, num_workers=workers), whole[2:])


def test_each_row_group_is_read_about_once_per_epoch(tmp_path, monkeypatch):
  sizes = [16] * 10
  source = sources.load(pairs(tmp_path, sizes, shuffle_window=16), 'train')
  assert source.window == 16 and source.subset(np.arange(0, 160, 2)).window == 8
  assert sources.load(config(tmp_path), 'train').window == parquet_source.WINDOW
  read = []
  opened = parquet_source._opened

  class Counting:
    def __init__(self, file):
      self.file = opened(file)

    def read_row_group(self, group, columns):
      read.append(group)
      return self.file.read_row_group(group, columns=columns)

  monkeypatch.setattr(parquet_source, '_opened', Counting)
  visited = np.concatenate([batch['index'] for batch in collect(source, batch_size=8, total_steps=20)])
  np.testing.assert_array_equal(np.sort(visited), np.arange(160))
  assert len(read) <= 44 and len(parquet_source._GROUPS) == source.kept == 6
