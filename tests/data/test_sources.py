import collections
import errno
import gc
import io
import os
import pathlib
import pickle
import re
import shutil
import socket
import sys
import threading
import zipfile

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from ssl_jax.data import classes, embedded, folder_source, resolve, sources, tfds_source
from tests.helpers import REAL, needs_real_data


def config(source, path, **changes):
  data = dict(source=source, name='tiny', path=str(path), train_split='train', test_split='test', image_size=8)
  return {**data, 'classes': '', 'broken': 'error', **changes}


def pixels(seed, height=8, width=8):
  return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def save(path, image, **options):
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)
  return path


def fails(match, data, split='train'):
  """Loading raises a ValueError whose single line matches."""
  with pytest.raises(ValueError, match=match) as error:
    sources.load(data, split)
  assert '\n' not in str(error.value)
  return str(error.value)


# tfds


def png(image):
  encoded = io.BytesIO()
  Image.fromarray(image).save(encoded, 'PNG')
  return encoded.getvalue()


def prepare(
  root, name='tiny', version='1.0.0', images=None, labels=None, label_names=('cat', 'dog'), fmt='array_record'
):
  """Writes a prepared tfds set with the split train, without TensorFlow."""
  import tensorflow_datasets as tfds
  from array_record.python.array_record_module import ArrayRecordWriter
  from tensorflow_datasets.proto import tf_example_pb2

  images = [pixels(k) for k in range(10)] if images is None else images
  labels = [k % 2 for k in range(len(images))] if labels is None else labels
  folder = root / name / version
  folder.mkdir(parents=True)
  template = tfds.core.ShardedFileTemplate(
    data_dir=folder,
    dataset_name=name.split('/')[0],
    split='train',
    filetype_suffix=fmt,
    template='{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}',
  )
  writer = ArrayRecordWriter(f'{folder}/{name.split("/")[0]}-train.{fmt}-00000-of-00001', 'group_size:1')
  for image, label in zip(images, labels, strict=True):
    example = tf_example_pb2.Example()
    example.features.feature['image'].bytes_list.value.append(image if isinstance(image, bytes) else png(image))
    example.features.feature['label'].int64_list.value.append(label)
    writer.write(example.SerializeToString())
  writer.close()
  tfds.folder_dataset.write_metadata(
    data_dir=folder,
    features=tfds.features.FeaturesDict(
      {
        'image': tfds.features.Image(shape=(None, None, 3)),
        'label': tfds.features.ClassLabel(names=label_names),
      }
    ),
    split_infos=[tfds.core.SplitInfo('train', [len(images)], 1, template)],
    filename_template=template,
    check_data=False,
  )


def test_no_garbage_is_collected_while_tfds_is_imported(monkeypatch):
  collects = []

  class Finder:
    def find_spec(self, name, *_):
      if name == 'tensorflow_datasets':
        collects.append(gc.isenabled())

  monkeypatch.delitem(sys.modules, 'tensorflow_datasets')
  monkeypatch.setattr(sys, 'meta_path', [Finder()])  # none finds it
  with pytest.raises(ValueError, match='needs tensorflow-datasets'):
    tfds_source.import_tfds()
  assert collects == [False] and gc.isenabled()


def test_tfds_gives_pixels_labels_and_names(tmp_path):
  prepare(tmp_path)
  source = sources.load(config('tfds', tmp_path), 'train')
  assert len(source) == 10 and source.class_names == ('cat', 'dog')
  np.testing.assert_array_equal(source.read(7), pixels(7))
  images, labels = source.arrays(8)
  np.testing.assert_array_equal(images, [pixels(k) for k in range(10)])
  np.testing.assert_array_equal(labels, [0, 1] * 5)
  assert images.dtype == np.uint8 and labels.dtype == np.int32
  assert source.nbytes_decoded(8) == images.nbytes


def test_tfds_reads_the_newest_version_parts_of_splits_and_the_default_folder(tmp_path, monkeypatch):
  prepare(tmp_path, version='1.9.0', images=[pixels(50)])
  prepare(tmp_path, version='1.10.0')
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  source = sources.load(config('tfds', '', train_split='train[60%:]'), 'train')
  np.testing.assert_array_equal(source.arrays(8)[0], [pixels(k) for k in range(6, 10)])
  np.testing.assert_array_equal(source.labels, [0, 1, 0, 1])
  old = sources.load(config('tfds', '', name='tiny:1.9.0'), 'train')
  np.testing.assert_array_equal(old.read(0), pixels(50))


def test_tfds_labels_without_images_and_subsets(tmp_path):
  prepare(tmp_path)
  source = sources.load(config('tfds', tmp_path), 'train')
  part = source.subset(np.array([9, 2, 5]))
  np.testing.assert_array_equal(part.labels, [1, 0, 1])
  np.testing.assert_array_equal(part.arrays(8)[0], [pixels(9), pixels(2), pixels(5)])
  again = part.subset(np.array([2]))
  np.testing.assert_array_equal(again.read(0), pixels(5))
  np.testing.assert_array_equal(again.labels, [1])


def test_tfds_split_without_labels_is_unlabeled(tmp_path):
  prepare(tmp_path, labels=[-1] * 10)  # as in the unlabeled split of STL-10
  assert sources.load(config('tfds', tmp_path), 'train').labels is None


def test_tfds_source_can_be_pickled(tmp_path):
  prepare(tmp_path)
  source = pickle.loads(pickle.dumps(sources.load(config('tfds', tmp_path), 'train')))
  np.testing.assert_array_equal(source.read(3), pixels(3))


def test_unprepared_tfds_fails_without_the_network(tmp_path, monkeypatch):
  def no_network(*args):
    raise AssertionError('the network was asked')

  monkeypatch.setattr(socket.socket, 'connect', no_network)
  monkeypatch.setattr(socket, 'getaddrinfo', no_network)
  prepare(tmp_path)
  message = fails("data.name = 'cifar10' is not prepared in ", config('tfds', tmp_path, name='cifar10'))
  assert f'{tmp_path} (there: tiny)' in message
  assert message.endswith(
    f': run python main.py --mode=prepare --config=configs/cifar10.py --config.data.path={tmp_path}'
  )
  assert (
    "run pip install -e '.[tensorflow]' && python -c \"import tensorflow_datasets as tfds; tfds.builder('mnist',"
    f" data_dir='{tmp_path}', file_format='array_record').download_and_prepare()\""
  ) in fails("data.name = 'mnist' is not prepared", config('tfds', tmp_path, name='mnist'))
  fails("'cifar10' is not prepared", config('tfds', tmp_path / 'nowhere', name='cifar10'))
  fails("data.name = 'mnist:9.0.0' is not prepared", config('tfds', tmp_path, name='mnist:9.0.0'))
  fails("'imagenet_v2/topimages' is not prepared", config('tfds', tmp_path, name='imagenet_v2/topimages'))
  fails(
    r"'imagenet2012' is not prepared .*: put ILSVRC2012_img_\{train,val\}\.tar into .*/downloads/manual, then run pip",
    config('tfds', tmp_path, name='imagenet2012'),
  )


def test_an_unknown_tfds_name_suggests_the_nearest(tmp_path):
  fails("'cifar01' is neither .* did you mean 'cifar10'", config('tfds', tmp_path, name='cifar01'))
  prepare(tmp_path)
  fails("'tinny' is neither .* did you mean 'tiny'", config('tfds', tmp_path, name='tinny'))
  fails("'wxyz' is neither .*: give one of tiny, ", config('tfds', tmp_path, name='wxyz'))


def test_tfds_with_an_unknown_split_or_format_is_rejected(tmp_path):
  prepare(tmp_path)
  fails(
    "data.train_split = 'trian' is not a split of 'tiny'.* did you mean 'train'",
    config('tfds', tmp_path, train_split='trian'),
  )
  fails("data.test_split = 'train\\[:x' is not a split", config('tfds', tmp_path, test_split='train[:x'), 'test')
  prepare(tmp_path, name='stream', fmt='tfrecord')
  fails("'stream' .* is prepared as tfrecord", config('tfds', tmp_path, name='stream'))


def test_tfds_configurations(tmp_path):
  prepare(tmp_path, name='tiny/small')
  assert len(sources.load(config('tfds', tmp_path), 'train')) == 10  # there is only one
  prepare(tmp_path, name='tiny/large', images=[pixels(0)])
  assert len(sources.load(config('tfds', tmp_path, name='tiny/large'), 'train')) == 1
  fails('several configurations: give one of tiny/large, tiny/small', config('tfds', tmp_path))


def test_a_broken_record_is_reported_or_skipped(tmp_path):
  prepare(tmp_path, images=[pixels(0), png(pixels(1))[:-40], b'no image', pixels(3)])
  source = sources.load(config('tfds', tmp_path), 'train')
  for k in (1, 2):
    with pytest.raises(ValueError, match=rf'record {k} of .*tiny/1\.0\.0 \(train\) is not a readable image'):
      source.read(k)
  source = sources.load(config('tfds', tmp_path, broken='skip'), 'train')
  images, labels = source.arrays(8)
  np.testing.assert_array_equal(images, [pixels(0), pixels(3)])
  np.testing.assert_array_equal(labels, [0, 1])
  assert source.skipped == {1, 2}


def test_a_damaged_record_is_reported_or_skipped(tmp_path):
  prepare(tmp_path)
  (file,) = tmp_path.glob('tiny/1.0.0/*.array_record*')
  content = bytearray(file.read_bytes())
  content[content.find(png(pixels(3))) + 60] ^= 0xFF
  file.write_bytes(content)
  source = sources.load(config('tfds', tmp_path), 'train')
  for read in (lambda: source.read(3), lambda: source.arrays(8), lambda: source.labels):
    with pytest.raises(ValueError, match=r'record 3 of .* is not a readable .* \(damaged: .*: fix .* data.broken=skip'):
      read()
  source = sources.load(config('tfds', tmp_path, broken='skip'), 'train')
  images, labels = source.arrays(8)
  kept = [k for k in range(10) if k != 3]
  np.testing.assert_array_equal(images, [pixels(k) for k in kept])
  np.testing.assert_array_equal(labels, [k % 2 for k in kept])
  assert source.skipped == {3} and source.first_readable(3, np.asarray)[1] == 4


# Arrays


def archive(tmp_path, **arrays):
  np.savez(tmp_path / 'set.npz', **arrays)
  return tmp_path / 'set.npz'


def test_arrays_are_returned_as_they_are(tmp_path):
  train, test = np.stack([pixels(0), pixels(1)]), pixels(2)[None]
  path = archive(
    tmp_path, train_images=train, train_labels=np.array([1, 0]), test_images=test, test_labels=np.uint8([1])
  )
  source = sources.load(config('arrays', path), 'train')
  images, labels = source.arrays(8)
  np.testing.assert_array_equal(images, train)
  np.testing.assert_array_equal(labels, [1, 0])
  assert labels.dtype == np.int32
  np.testing.assert_array_equal(source.read(1), train[1])
  np.testing.assert_array_equal(sources.load(config('arrays', path), 'test').arrays(8)[0], test)


@pytest.mark.parametrize('shape', [(3, 8, 8), (3, 8, 8, 1)])
def test_greyscale_arrays_become_rgb(tmp_path, shape):
  grey = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  source = sources.load(config('arrays', archive(tmp_path, train_images=grey)), 'train')
  np.testing.assert_array_equal(source.arrays(8)[0], np.stack([grey.reshape(3, 8, 8)] * 3, -1))
  assert source.labels is None


def test_arrays_of_another_size_are_resized_about_the_centre(tmp_path):
  wide = np.zeros((1, 16, 40, 3), np.uint8)
  wide[:, :, 12:28] = pixels(0, 16, 16)
  images, _ = sources.load(config('arrays', archive(tmp_path, train_images=wide)), 'train').arrays(8)
  square = Image.fromarray(wide[0]).resize((20, 8), Image.Resampling.BILINEAR).crop((6, 0, 14, 8))
  # The two ways differ only where the filter looks over the edge of the centre.
  np.testing.assert_allclose(images[0][:, 1:-1].astype(int), np.asarray(square)[:, 1:-1].astype(int), atol=1)


def test_arrays_subset(tmp_path):
  images = np.stack([pixels(k) for k in range(4)])
  source = sources.load(config('arrays', archive(tmp_path, train_images=images, train_labels=np.arange(4))), 'train')
  part = source.subset(np.array([3, 1]))
  np.testing.assert_array_equal(part.arrays(8)[0], images[[3, 1]])
  np.testing.assert_array_equal(part.labels, [3, 1])


def test_negative_numbers_are_no_labels(tmp_path, capsys):
  images = np.stack([pixels(k) for k in range(3)])
  for labels, message in (([-1, -1, -1], ''), ([1, -1, 0], '1 of 3 images have no label: labels are not used\n')):
    path = archive(tmp_path, train_images=images, train_labels=np.array(labels))
    assert sources.load(config('arrays', path), 'train').labels is None
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
  'header', [b"{'descr': '|u1', (", b"{'a': 1}\n  x\n y", None, 'encrypted', 'compressed by an unknown method']
)
def test_a_damaged_archive_is_rejected(tmp_path, header):
  path = tmp_path / 'set.npz'
  if isinstance(header, bytes):
    with zipfile.ZipFile(path, 'w') as file:
      length = len(header).to_bytes(2, 'little')
      file.writestr('train_images.npy', b'\x93NUMPY\x01\x00' + length + header)
  else:
    np.savez(path, train_images=np.zeros((2, 8, 8, 3), np.uint8))
    content = bytearray(path.read_bytes())
    central = content.find(b'PK\x01\x02')
    if header == 'encrypted':
      content[6] |= 1
      content[central + 8] |= 1
    elif header:
      content[8] = content[central + 10] = 97
    else:
      content[content.find(b'\x93NUMPY')] = 0
    path.write_bytes(content)
  fails('data.path = .* must be an .npz file', config('arrays', path))


def test_unusable_arrays_are_rejected(tmp_path):
  good = np.zeros((2, 8, 8, 3), np.uint8)
  for match, arrays in [
    ('train_images of .* has dtype float32: store uint8', dict(train_images=good.astype(np.float32))),
    (r'shape \(2, 3, 8, 8\): store \[N, H, W, 3\]', dict(train_images=good.transpose(0, 3, 1, 2))),
    (r'shape \(0, 8, 8, 3\)', dict(train_images=good[:0])),
    (r'train_labels of .* is int64 \(3,\): store one whole number', dict(train_images=good, train_labels=np.arange(3))),
    ('train_labels of .* is float64', dict(train_images=good, train_labels=np.zeros(2))),
    (
      'train_labels of .*: classes up to 1,000,000, but only 2 occur; number',
      dict(train_images=good, train_labels=np.array([0, 10**6])),
    ),
    (
      'class_names of .* has 2 names, but train_labels reach 2: name each class',
      dict(train_images=good, train_labels=np.arange(1, 3), class_names=np.array(['cat', 'dog'])),
    ),
    ('it contains images, labels, not train_images', dict(images=good, labels=np.zeros(2))),
    ('pickled objects are rejected', dict(train_images=np.array([good, None], object))),
  ]:
    fails(match, config('arrays', archive(tmp_path, **arrays)))
  np.save(tmp_path / 'bare.npy', good)
  (tmp_path / 'text.npz').write_text('no archive')
  for name in ('bare.npy', 'text.npz', 'absent.npz'):
    fails(f'data.path = .*{re.escape(name)}. must be an .npz file', config('arrays', tmp_path / name))


# Folders


def class_folders(tmp_path):
  for seed, folder in enumerate(['train/cat', 'train/dog', 'train/owl', 'test/cat', 'test/owl']):
    for k in range(3):
      save(tmp_path / folder / f'{k}.png', pixels(3 * seed + k))


def test_class_folders_are_sorted_and_labeled(tmp_path):
  class_folders(tmp_path)
  source = sources.load(config('folder', tmp_path), 'train')
  assert source.class_names == ('cat', 'dog', 'owl')
  assert [str(pathlib.Path(path).relative_to(tmp_path)) for path in source.items] == [
    f'train/{name}/{k}.png' for name in ('cat', 'dog', 'owl') for k in range(3)
  ]
  images, labels = source.arrays(8)
  np.testing.assert_array_equal(labels, np.repeat([0, 1, 2], 3))
  np.testing.assert_array_equal(images, [pixels(k) for k in range(9)])
  part = source.subset(np.array([8, 0]))
  np.testing.assert_array_equal(part.labels, [2, 0])
  np.testing.assert_array_equal(part.read(0), source.read(8))


def test_a_class_has_the_same_label_in_both_splits(tmp_path):
  class_folders(tmp_path)
  source = sources.load(config('folder', tmp_path), 'test')  # which has no dogs
  assert source.class_names == ('cat', 'dog', 'owl')
  np.testing.assert_array_equal(source.labels, np.repeat([0, 2], 3))


def test_flat_folder_is_unlabeled_and_extensions_may_have_any_case(tmp_path):
  for k, name in enumerate(['a.PNG', 'b.jpeg', 'c.JPEG', 'd.JPG', 'e.bmp', 'f.WebP']):
    save(tmp_path / 'train' / name, pixels(k), format=None if k else 'PNG')
  (tmp_path / 'train' / 'notes.txt').write_text('no image')
  (tmp_path / 'train' / '._a.jpg').write_text('hidden')
  source = sources.load(config('folder', tmp_path), 'train')
  assert [os.path.basename(path)[0] for path in source.items] == list('abcdef')
  images, labels = source.arrays(8)
  assert images.shape == (6, 8, 8, 3) and labels is None and source.class_names == ()


def test_the_file_of_several_labels_is_not_one_that_is_ignored(tmp_path, capsys):
  save(tmp_path / 'train/a.png', pixels(0))
  (tmp_path / 'train/labels.csv').write_text('a.png,cat,dog\n')
  assert sources.load(config('folder', tmp_path), 'train').multi_labels() == [['cat', 'dog']]
  assert not capsys.readouterr().err


def test_names_that_cannot_be_printed_are_shown_in_ascii(tmp_path):
  for name in (b'caf\xe9', b'two\nlines'):
    save(tmp_path / 'train' / os.fsdecode(name) / 'a.png', pixels(0))
  assert sources.load(config('folder', tmp_path), 'train').class_names == (r"'caf\udce9'", r"'two\nlines'")


def test_many_files_are_asked_for_their_status_at_once(tmp_path, monkeypatch):
  paths = [str(save(tmp_path / f'{k}.png', pixels(k))) for k in range(3)]
  expected = [sources.stamp(path) for path in paths]
  together = threading.Barrier(3)  # on network storage, each answer takes up to a millisecond
  monkeypatch.setattr(sources, 'BULK', 1)
  monkeypatch.setattr(sources, 'stamp', lambda path, stamp=sources.stamp: (together.wait(20), stamp(path))[1])
  assert list(sources.stamps(paths)) == expected


def test_an_image_takes_one_request_for_its_path(tmp_path, monkeypatch):
  save(tmp_path / 'train/a.png', pixels(0))
  source = sources.load(config('folder', tmp_path), 'train')
  monkeypatch.setattr(os, 'stat', None)  # calling it would fail
  np.testing.assert_array_equal(source.read(0), pixels(0))


def test_nested_images_belong_to_the_class_above(tmp_path):
  save(tmp_path / 'train/cat/2021/a.png', pixels(0))
  save(tmp_path / 'train/cat/2020/b.png', pixels(1))
  save(tmp_path / 'train/dog/c.png', pixels(2))
  save(tmp_path / 'train/.cache/d.png', pixels(3))
  (tmp_path / 'train/dog/again').symlink_to(tmp_path / 'train/dog')
  source = sources.load(config('folder', tmp_path), 'train')
  np.testing.assert_array_equal(source.labels, [0, 0, 1])
  np.testing.assert_array_equal(source.read(0), pixels(1))


def test_unusable_folders_are_rejected(tmp_path):
  fails(
    r"data.path = '' is not a folder: set it to a folder DIR with the images in DIR/train/<class>/\*\.JPEG",
    config('folder', ''),
  )
  fails('absent. is not a folder', config('folder', tmp_path / 'absent'))
  save(tmp_path / 'set/training/a.png', pixels(0))
  fails(
    r"data.train_split = 'train' is not a folder in .*, as in .*/set/train/<class>/\*\.JPEG: did you mean 'training'",
    config('folder', tmp_path / 'set'),
  )
  save(tmp_path / 'plain/a.png', pixels(0))
  fails(
    "is not a folder in .*: set data.train_split='' if the images are in data.path",
    config('folder', tmp_path / 'plain'),
  )
  (tmp_path / 'empty/train').mkdir(parents=True)
  fails('empty/train has neither class folders, .* nor images', config('folder', tmp_path / 'empty'))
  save(tmp_path / 'half/train/cat/a.png', pixels(0))
  (tmp_path / 'half/train/dog').mkdir()
  fails('class folder .*half/train/dog has no images', config('folder', tmp_path / 'half'))
  save(tmp_path / 'mixed/train/cat/a.png', pixels(0))
  save(tmp_path / 'mixed/train/b.png', pixels(0))
  fails('mixed/train has both images and folders', config('folder', tmp_path / 'mixed'))


def test_every_kind_of_image_becomes_rgb(tmp_path):
  rng = np.random.default_rng(0)
  grey = rng.integers(0, 256, (8, 8), np.uint8)
  transparent = Image.fromarray(grey).convert('P')
  folder = tmp_path / 'train'
  save(folder / 'a.png', Image.fromarray(grey))
  save(folder / 'b.png', transparent, transparency=bytes(range(256)))
  save(folder / 'c.png', Image.fromarray(np.dstack([pixels(0), grey])))
  save(folder / 'd.png', Image.fromarray((grey.astype(np.uint16) << 8) + 77))
  save(folder / 'e.jpg', Image.new('CMYK', (8, 8), (255, 0, 0, 0)))
  save(folder / 'f.png', Image.fromarray(grey > 127))
  images, _ = sources.load(config('folder', tmp_path), 'train').arrays(8)
  stacked = np.stack([grey] * 3, -1)
  np.testing.assert_array_equal(images[0], stacked)
  np.testing.assert_array_equal(images[1], np.asarray(transparent.convert('RGB')))
  np.testing.assert_array_equal(images[2], pixels(0))
  np.testing.assert_array_equal(images[3], stacked)
  assert abs(images[4].astype(int) - [0, 255, 255]).max() < 8  # all of cyan, none of the rest
  np.testing.assert_array_equal(images[5], np.where(stacked > 127, 255, 0))


def test_an_image_of_another_format_is_not_parsed(tmp_path, monkeypatch):
  monkeypatch.setattr(EpsImagePlugin, 'Ghostscript', lambda *_: pytest.fail('Ghostscript was started'))
  save(tmp_path / 'folder/train/a.jpg', pixels(0), format='EPS')
  prepare(tmp_path, images=[(tmp_path / 'folder/train/a.jpg').read_bytes()])
  for data in (config('folder', tmp_path / 'folder'), config('tfds', tmp_path)):
    with pytest.raises(ValueError, match=r'is not a readable image \(unknown format\)'):
      sources.load(data, 'train').read(0)


def test_a_jpeg_of_several_images_is_its_first(tmp_path):
  first, second = (Image.fromarray(pixels(k)) for k in range(2))
  save(tmp_path / 'train/a.jpg', first, format='MPO', save_all=True, append_images=[second])
  with Image.open(tmp_path / 'train/a.jpg') as image:
    expected = np.asarray(image)
  np.testing.assert_array_equal(sources.load(config('folder', tmp_path), 'train').read(0), expected)


def test_a_large_jpeg_decoded_at_a_fraction_of_its_size_is_close(tmp_path):
  smooth = Image.fromarray(pixels(0, 10, 12)).resize((1200, 1000), Image.Resampling.BICUBIC)
  path = save(tmp_path / 'train/a.jpg', smooth, quality=95)
  images, _ = sources.load(config('folder', tmp_path), 'train').arrays(100)
  with Image.open(path) as image:
    exact = np.asarray(image.resize((120, 100), Image.Resampling.BILINEAR).crop((10, 0, 110, 100)))
  assert abs(images[0].astype(int) - exact.astype(int)).mean() < 1


def break_images(tmp_path):
  """Six images, of which number 2 is truncated and number 3 is not an image."""
  for k in range(6):
    save(tmp_path / f'train/c{k % 2}/{k}.jpg', pixels(k, 64, 64))
  paths = sources.load(config('folder', tmp_path), 'train').items
  whole = pathlib.Path(paths[2]).read_bytes()
  pathlib.Path(paths[2]).write_bytes(whole[: len(whole) // 2])
  pathlib.Path(paths[3]).write_bytes(b'not an image')
  return paths


def test_an_error_names_the_broken_image(tmp_path):
  paths = break_images(tmp_path)
  source = sources.load(config('folder', tmp_path), 'train')
  for k in (2, 3):
    message = f'{re.escape(paths[k])} is not a readable image .*: fix or remove it, or set data.broken=skip'
    with pytest.raises(ValueError, match=message):
      source.read(k)
  with pytest.raises(ValueError, match='is not a readable image'):
    source.arrays(64)
  assert source.read(4).shape == (64, 64, 3)


def test_broken_images_are_skipped_and_counted(tmp_path):
  break_images(tmp_path)
  source = sources.load(config('folder', tmp_path, broken='skip'), 'train')
  assert not source.skipped
  images, labels = source.arrays(64)
  assert source.skipped == source.in_memory(64).skipped == {2, 3}
  np.testing.assert_array_equal(images, [source.read(k) for k in (0, 1, 4, 5)])
  np.testing.assert_array_equal(labels, source.labels[[0, 1, 4, 5]])
  np.testing.assert_array_equal(source.read(2), source.read(4))  # the next good one
  assert source.skipped == {2, 3}  # each is counted once


def test_an_error_of_the_storage_is_never_skipped(tmp_path, monkeypatch):
  """Otherwise, a network that does not answer would silently remove images from the training set."""
  for k in range(3):
    save(tmp_path / f'train/{k}.png', pixels(k))
  source = sources.load(config('folder', tmp_path, broken='skip'), 'train')

  def stale(path):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

  monkeypatch.setattr(folder_source, '_open_file', stale)
  for read in (lambda: source.read(0), lambda: source.arrays(8)):
    with pytest.raises(ValueError, match=r'0.png cannot be read \(Stale file handle\), .*: repair the storage and run'):
      read()
  assert not source.skipped


def test_the_next_good_image_is_found_past_the_end(tmp_path):
  paths = break_images(tmp_path)
  source = sources.load(config('folder', tmp_path, broken='skip'), 'train')
  pathlib.Path(paths[5]).unlink()
  image, position = source.first_readable(5, lambda image: image.size)
  assert (image, position) == ((64, 64), 0)
  for path in paths:
    pathlib.Path(path).unlink(missing_ok=True)
  with pytest.raises(ValueError, match=r'none of the 6 images starting at .* can be read: check that the data'):
    source.read(0)


# Lists of classes, names, the embedded set


def test_imagenet100_is_a_hundred_distinct_classes():
  assert len(set(classes.IMAGENET100)) == 100
  assert all(re.fullmatch(r'n\d{8}', name) for name in classes.IMAGENET100)
  assert classes.IMAGENET100[0] == 'n02869837' and classes.IMAGENET100[-1] == 'n02090622'
  assert 'n13040303' in classes.IMAGENET100


def test_a_named_list_keeps_its_classes_and_renumbers_them(tmp_path, monkeypatch):
  class_folders(tmp_path)
  monkeypatch.setitem(classes.NAMED, 'birds', ('owl', 'cat'))
  source = sources.load(config('folder', tmp_path, classes='birds'), 'train')
  assert source.class_names == ('cat', 'owl')
  np.testing.assert_array_equal(source.labels, np.repeat([0, 1], 3))
  assert all('dog' not in path for path in source.items)


def test_a_named_list_in_tfds(tmp_path, monkeypatch):
  prepare(tmp_path, labels=[0, 1, 2, 0, 1, 2, 0, 1, 2, 0], label_names=('cat', 'dog', 'owl'))
  monkeypatch.setitem(classes.NAMED, 'birds', ('owl', 'cat'))
  source = sources.load(config('tfds', tmp_path, classes='birds'), 'train')
  np.testing.assert_array_equal(source.labels, [0, 1, 0, 1, 0, 1, 0])
  np.testing.assert_array_equal(source.read(1), pixels(2))
  np.testing.assert_array_equal(source.arrays(8)[1], source.labels)


def test_a_named_list_that_the_data_lacks_is_rejected(tmp_path):
  class_folders(tmp_path)
  fails(
    "data.classes = 'imagenet100' has 100 classes, of which the data lacks 100",
    config('folder', tmp_path, classes='imagenet100'),
  )
  path = archive(tmp_path, train_images=pixels(0)[None], class_names=np.array(classes.IMAGENET100))
  fails('needs labels, and the images have none', config('arrays', path, classes='imagenet100'))


def test_an_unknown_name_suggests_the_nearest(tmp_path):
  fails("data.source = 'folders' is not a valid choice: did you mean 'folder'", config('folders', tmp_path))
  fails("data.broken = 'skipp' is not a valid choice: did you mean 'skip'", config('folder', tmp_path, broken='skipp'))
  fails(
    "data.classes = 'imagenet10' is not a valid choice: did you mean 'imagenet100'",
    config('folder', tmp_path, classes='imagenet10'),
  )
  fails("split = 'val' is not a valid choice", config('folder', tmp_path), 'val')
  fails(
    "data.train_split = 'trian' is not a valid choice: did you mean 'train'",
    config('embedded', '', train_split='trian'),
  )


def test_the_embedded_set_is_a_source():
  source = sources.load(config('embedded', ''), 'test')
  images, labels = source.arrays(32)
  expected, expected_labels = embedded.generate('test')
  np.testing.assert_array_equal(images, expected)
  np.testing.assert_array_equal(labels, expected_labels)
  assert source.class_names == embedded.CLASSES


# Real photographs


@needs_real_data
def test_imagenette_is_read_exactly():
  data = config('folder', f'{REAL}/imagenette', test_split='val', image_size=224)
  source = sources.load(data, 'test')
  images, labels = source.arrays(224)
  assert images.shape == (400, 224, 224, 3)
  assert np.bincount(labels).tolist() == [40] * 10
  for k in (0, 123, 399):
    with Image.open(source.items[k]) as image:
      np.testing.assert_array_equal(images[k], np.asarray(image.convert('RGB')))
  grey = (images == images[..., :1]).all((1, 2, 3)).sum()
  train, _ = sources.load(data, 'train').arrays(224)
  assert len(train) == 1000
  assert grey + (train == train[..., :1]).all((1, 2, 3)).sum() >= 25


@needs_real_data
def test_imagewoof_of_many_shapes_becomes_an_array():
  source = sources.load(config('folder', f'{REAL}/imagewoof', test_split='val'), 'test')
  shapes = {source.read(k).shape for k in range(len(source))}
  assert len(shapes) > 3 and {min(shape[:2]) for shape in shapes} == {320}
  images, labels = source.arrays(64)
  assert images.shape == (50, 64, 64, 3) and np.bincount(labels).tolist() == [5] * 10
  with Image.open(source.items[7]) as image:
    image = image.convert('RGB')
  left, top = (image.width - 320) / 2, (image.height - 320) / 2
  expected = image.resize((64, 64), Image.Resampling.BILINEAR, (left, top, left + 320, top + 320))
  assert abs(images[7].astype(int) - np.asarray(expected).astype(int)).mean() < 2


# Parts of one split


def test_parts_of_a_tfds_split_that_overlap_share_images(tmp_path):
  prepare(tmp_path)

  def shared(train, test):
    data = config('tfds', tmp_path, train_split=train, test_split=test)
    return len(sources.same_images(*(sources.load(data, split) for split in ('train', 'test'))))

  assert (shared('train', 'train'), shared('train', 'train[:50%]'), shared('train[40%:]', 'train[:50%]')) == (10, 5, 1)
  assert shared('train[50%:]', 'train[:50%]') == 0


def test_a_share_of_a_tfds_split_is_held_out(tmp_path):
  prepare(tmp_path)
  data = config('tfds', tmp_path, test_split='train', held_out=0.2)
  train, test = (sources.load(data, split) for split in ('train', 'test'))
  assert sorted([*train.items, *test.items]) == list(range(10))
  np.testing.assert_array_equal(np.bincount(test.labels), [1, 1])
  assert sources.same_images(train, test) == []
  assert sources.same_images(train.in_memory(8), test.in_memory(8)) == []
  assert len(sources.same_images(train.in_memory(8), train.in_memory(4))) == 8


def test_a_share_is_held_out_of_names_that_are_not_utf8(tmp_path):
  for k in range(4):
    save(tmp_path / 'train' / os.fsdecode(b'\xff%d.png' % k), pixels(k))
  data = config('folder', tmp_path, test_split='train', held_out=0.25)
  assert [len(sources.load(data, split)) for split in ('train', 'test')] == [3, 1]


def test_the_labels_of_a_few_records_are_read_alone(tmp_path):
  prepare(tmp_path)
  source = sources.load(config('tfds', tmp_path), 'train')
  np.testing.assert_array_equal(source.labels_of(np.array([3, 4])), [1, 0])
  assert source._labels is None
  assert [source.class_name(label) for label in (1, 7)] == ['dog', 'class 7']


# Folders


def pictures(root, *names, count=2):
  for name in names:
    (root / name).mkdir(parents=True, exist_ok=True)
    for k in range(count):
      Image.new('RGB', (8, 8), (10 * k, 0, 0)).save(root / name / f'{k}.png')


def folders(root, train='auto'):
  return resolve.split_names(dict(source='folder', path=str(root), train_split=train, test_split='auto'))


def test_a_class_that_is_named_train_is_not_taken_for_the_training_set(tmp_path):
  pictures(tmp_path, 'bus', 'train', 'truck')
  with pytest.raises(
    ValueError, match=r"data.train_split = 'auto' is ambiguous, because .* has train/ and bus/: set it"
  ):
    folders(tmp_path)
  assert folders(tmp_path, '') == {'train_split': '', 'test_split': ''}
  assert folders(tmp_path, 'train') == {'train_split': 'train', 'test_split': 'train'}
  pictures(tmp_path / 'other', 'train', 'test')
  assert folders(tmp_path / 'other') == {'train_split': 'train', 'test_split': 'test'}
  pictures(tmp_path / 'third', 'train/a', 'extra')
  assert folders(tmp_path / 'third') == {'train_split': 'train', 'test_split': 'train'}


def test_class_folders_of_imagenet_are_found_without_a_path(tmp_path, monkeypatch):
  pictures(tmp_path, 'train/n01', 'train/n02', 'val/n01', 'val/n02')
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  data = config('imagenet', '', name='imagenet', test_split='val')
  assert len(sources.load(resolve.locate(data), 'train')) == 4
  assert resolve.locate({**data, 'path': str(tmp_path)}) == {**data, 'source': 'folder', 'path': str(tmp_path)}


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
  with pytest.raises(
    ValueError, match=r'gone cannot be read \(No such file or directory\): make it readable, or remove'
  ):
    folder_source._images_in(tmp_path / 'gone', collections.Counter())


def test_classes_of_one_image_leave_nothing_to_hold_out(tmp_path):
  pictures(tmp_path, 'a', 'b', count=1)
  data = dict(name='x', source='folder', path=str(tmp_path), train_split='', test_split='', broken='error', classes='')
  assert len(sources.load({**data, 'held_out': 0.1}, 'train')) == 2
  with pytest.raises(ValueError, match=r'data.held_out = 0.1 leaves no test image, because no class has two images'):
    sources.load({**data, 'held_out': 0.1}, 'test')


def test_other_files_of_the_same_names_have_other_sizes(tmp_path):
  for name in ('one', 'other'):
    pictures(tmp_path / name, 'train/a', 'train/b')
  shutil.copytree(tmp_path / 'one', tmp_path / 'two')
  Image.new('RGB', (40, 40)).save(next((tmp_path / 'other').glob('train/a/*')))
  data = dict(name='x', source='folder', train_split='train', test_split='train', broken='error')
  load = lambda name: folder_source.load({**data, 'path': str(tmp_path / name)}, 'train')
  one, two, other = (load(name) for name in ('one', 'two', 'other'))
  assert one.contents() == other.contents()
  assert one.sizes() == two.sizes() == one.in_memory(4).sizes() != other.sizes()
  assert sources.Arrays(np.zeros((2, 4, 4, 3), np.uint8), None, []).sizes() == ''


def test_contents_do_not_depend_on_where_and_how_images_are_stored(tmp_path):
  pictures(tmp_path / 'one', 'train/a', 'train/b')
  pictures(tmp_path / 'two', 'train/a', 'train/b')
  pictures(tmp_path / 'other', 'train/a', 'train/c')
  data = dict(name='x', source='folder', train_split='train', test_split='train', broken='error')
  load = lambda name: folder_source.load({**data, 'path': str(tmp_path / name)}, 'train')
  one, two, other = (load(name) for name in ('one', 'two', 'other'))
  assert one.contents() == two.contents() == one.in_memory(4).contents() != other.contents()
  images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
  source, inverse = (sources.Arrays(x, np.arange(6) % 2) for x in (images, 255 - images))
  assert source.contents() == source.in_memory(4).contents() != inverse.contents()
