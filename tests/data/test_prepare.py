"""Archives in the official layout, byte for byte, become sets with the same pixels and labels."""

import hashlib
import importlib.util
import io
import pathlib
import sys
import tarfile
import threading
import time
import urllib.error
import zipfile
from unittest import mock

import numpy as np
import pytest
import scipy.io
from absl import flags
from PIL import Image

import main
from configs import base
from ssl_jax import config
from ssl_jax.data import archives, prepare, resolve, sources
from tests.helpers import REAL, needs_real_data

CIFAR10 = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']


def md5(path):
  return hashlib.md5(path.read_bytes()).hexdigest()


def rng():
  return np.random.default_rng(0)


def pixels(count, size=32):
  return rng().integers(0, 256, (count, size, size, 3), np.uint8)


def tar(path, files):
  with tarfile.open(path, 'w:gz', compresslevel=1) as archive:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return path


def cifar_rows(images, *labels):
  """The class or classes of an image, then all its red values, all green and all blue, row by row."""
  return b''.join(
    bytes([*(int(column[k]) for column in labels)]) + b''.join(image[:, :, c].tobytes() for c in range(3))
    for k, image in enumerate(images)
  )


def cifar10(folder, train=None, test=None):
  """cifar-10-binary.tar.gz, and {split: (images, labels)}."""
  train = train or (pixels(25), np.arange(25) % 10)
  test = test or (pixels(7)[::-1], np.arange(7)[::-1] + 3)
  files = {'batches.meta.txt': '\n'.join([*CIFAR10, '', '']).encode(), 'readme.html': b'<html>'}
  size = len(train[0]) // 5
  for k in range(5):
    part = slice(k * size, (k + 1) * size)
    files[f'data_batch_{k + 1}.bin'] = cifar_rows(train[0][part], train[1][part])
  files['test_batch.bin'] = cifar_rows(*test)
  path = tar(folder / 'cifar-10-binary.tar.gz', {f'cifar-10-batches-bin/{name}': x for name, x in files.items()})
  return [path], {'train': train, 'test': test}


def cifar100(folder, train=None, test=None, fine=None, coarse=None):
  """cifar-100-binary.tar.gz, and {split: (images, coarse labels, labels)}."""
  train = train or (pixels(25), np.arange(25) % 20, np.arange(25) * 4)
  test = test or (pixels(7), np.arange(7), np.arange(7) + 50)
  files = {
    'coarse_label_names.txt': '\n'.join([*(coarse or [f'c{k}' for k in range(20)]), '']).encode(),
    'fine_label_names.txt': '\n'.join([*(fine or [f'f_{k}' for k in range(100)]), '']).encode(),
    'test.bin': cifar_rows(*test),
    'train.bin': cifar_rows(*train),
  }
  path = tar(folder / 'cifar-100-binary.tar.gz', {f'cifar-100-binary/{name}': x for name, x in files.items()})
  return [path], {'train': train, 'test': test}


def svhn(folder):
  """train_32x32.mat and test_32x32.mat, where the digit 0 is the class 10."""
  splits = {'train': (pixels(30), np.arange(30) % 10), 'test': (pixels(8)[::-1], np.arange(8) % 10)}
  paths = []
  for split, (images, digits) in splits.items():
    paths.append(folder / f'{split}_32x32.mat')
    held = {'X': images.transpose(1, 2, 3, 0), 'y': np.where(digits == 0, 10, digits)[:, None].astype(np.uint8)}
    scipy.io.savemat(paths[-1], held, do_compression=True)
  return paths, splits


def stl10(folder):
  """stl10_binary.tar.gz: each plane is stored column by column."""
  planes = lambda images: b''.join(image[:, :, c].T.tobytes() for image in images for c in range(3))
  splits = {
    'train': (pixels(10, 96), np.arange(10)),
    'test': (pixels(4, 96)[::-1], np.arange(4)),
    'unlabelled': (pixels(6, 96)[::-1], np.full(6, -1)),
  }
  names = ['airplane', 'bird', 'car', 'cat', 'deer', 'dog', 'horse', 'monkey', 'ship', 'truck']
  files = {'class_names.txt': '\n'.join([*names, '']).encode(), 'fold_indices.txt': b'0 1\n'}
  for split, (images, labels) in splits.items():
    part = split.replace('ll', 'l')
    files[f'{part}_X.bin'] = planes(images)
    if split != 'unlabelled':
      files[f'{part}_y.bin'] = bytes(k + 1 for k in labels.tolist())
  path = tar(folder / 'stl10_binary.tar.gz', {f'stl10_binary/{name}': x for name, x in files.items()})
  return [path], splits


SETS = {'cifar10': cifar10, 'cifar100': cifar100, 'svhn_cropped': svhn, 'stl10': stl10}


def section(name, path):
  chosen = config.load(archives.PUBLISHED[name].config, [f'data.path={path}'])
  config.validate(chosen, base.get_config())
  return chosen.data


def in_tfds_order(split, count):
  """The order in which tfds writes records with the keys 0, 1, ..."""
  from tensorflow_datasets.core import hashing

  hasher = hashing.Hasher(split)
  return sorted(range(count), key=hasher.hash_key)


def check(name, root, splits):
  """Our source and tfds read the pixels and labels of `splits` from the set in `root`, in the order of tfds."""
  import tensorflow_datasets as tfds

  for split, (images, *_, labels) in splits.items():
    order = in_tfds_order(split, len(images))
    data = {**section(name, root), 'train_split': split}
    found, found_labels = sources.load(data, 'train').arrays(images.shape[1])
    np.testing.assert_array_equal(found, images[order])
    np.testing.assert_array_equal(np.full(len(images), -1) if found_labels is None else found_labels, labels[order])
    records = tfds.data_source(name, data_dir=root, split=split)
    assert len(records) == len(images)
    for k in (0, len(order) - 1):
      np.testing.assert_array_equal(records[k]['image'], images[order[k]])
      assert records[k]['label'] == labels[order[k]]


@pytest.mark.parametrize('name', SETS)
def test_the_set_has_the_pixels_and_labels_of_the_archive(name, tmp_path, capsys):
  import tensorflow_datasets as tfds

  paths, splits = SETS[name](tmp_path)
  folder = prepare.prepare(section(name, tmp_path / 'sets'), [str(path) for path in paths], any_md5=True)
  check(name, tmp_path / 'sets', splits)
  prepared, stock = tfds.builder_from_directory(folder), tfds.builder(name, data_dir=tmp_path / 'empty')
  assert str(prepared.info.version) == str(stock.info.version)
  assert {key: (type(x), x.shape, x.np_dtype) for key, x in prepared.info.features.items()} == {
    key: (type(x), x.shape, x.np_dtype) for key, x in stock.info.features.items()
  }
  said = capsys.readouterr().out
  assert f'{name} train: {len(splits["train"][0])} images' in said and f'is prepared in {folder}' in said
  assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]  # no leftovers
  prepare.prepare(section(name, tmp_path / 'sets'))  # downloads nothing
  assert f'{name} is already prepared in {folder}' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['cifar10', 'cifar100'])
def test_the_records_and_features_are_those_that_tfds_writes(name, tmp_path):
  import tensorflow_datasets as tfds
  from etils import epath
  from tensorflow_datasets.core.download import download_manager
  from tensorflow_datasets.core.features import image_feature
  from tensorflow_datasets.image_classification import cifar

  def rows(path, labels=1):  # as tfds reads a file with TensorFlow
    for row in np.fromfile(path, np.uint8).reshape(-1, labels + 3072):
      yield row[:labels], row[labels:].reshape(3, 32, 32).transpose(1, 2, 0)

  [path], splits = SETS[name](tmp_path)
  with tarfile.open(path) as archive:
    archive.extractall(tmp_path / 'unpacked', filter='data')
  with (
    mock.patch.object(download_manager.DownloadManager, 'download_and_extract', lambda *_: tmp_path / 'unpacked'),
    mock.patch.object(image_feature._ImageEncoder, '_encode_image', lambda _, image: prepare._png(image)),
    mock.patch.object(cifar, '_load_data', rows),
  ):
    stock = tfds.builder(name, data_dir=epath.Path(tmp_path / 'stock'), file_format='array_record')
    stock.download_and_prepare()
  folder = prepare.prepare(section(name, tmp_path / 'ours'), [str(path)], any_md5=True)
  assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in stock.data_path.iterdir())
  for file in ('features.json', *(p.name for p in folder.glob('*.labels.txt'))):
    assert (folder / file).read_text() == (stock.data_path / file).read_text()
  for split in splits:
    ours, theirs = (tfds.data_source(name, data_dir=tmp_path / root, split=split) for root in ('ours', 'stock'))
    assert len(ours) == len(theirs) == len(splits[split][0])
    for a, b in zip(ours, theirs, strict=True):
      assert a.keys() == b.keys()
      for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def tiny_imagenet(folder):
  """tiny-imagenet-200.zip, and {place: bytes of the image}."""

  def jpeg(k):
    encoded = io.BytesIO()
    Image.fromarray(pixels(k + 1, 64)[k]).save(encoded, 'JPEG')
    return encoded.getvalue()

  wnids, places, root = ['n01443537', 'n01629819', 'n02002724'], {}, 'tiny-imagenet-200'
  annotations = ''
  with zipfile.ZipFile(folder / f'{root}.zip', 'w') as archive:
    archive.writestr(f'{root}/', '')
    archive.writestr(f'{root}/wnids.txt', '\n'.join(wnids))
    for k, wnid in enumerate(wnids):
      archive.writestr(f'{root}/train/{wnid}/{wnid}_boxes.txt', f'{wnid}_0.JPEG\t0\t10\t63\t58\n')
      for i in range(2):
        places[f'train/{wnid}/{wnid}_{i}.JPEG'] = jpeg(2 * k + i)
        archive.writestr(f'{root}/train/{wnid}/images/{wnid}_{i}.JPEG', places[f'train/{wnid}/{wnid}_{i}.JPEG'])
    for i, wnid in enumerate(['n02002724', 'n01443537', 'n02002724', 'n01629819']):
      places[f'val/{wnid}/val_{i}.JPEG'] = jpeg(10 + i)
      archive.writestr(f'{root}/val/images/val_{i}.JPEG', places[f'val/{wnid}/val_{i}.JPEG'])
      annotations += f'val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n'
    archive.writestr(f'{root}/val/val_annotations.txt', annotations)
    archive.writestr(f'{root}/test/images/test_0.JPEG', jpeg(0))
  return folder / f'{root}.zip', places


def test_tiny_imagenet_becomes_class_folders(tmp_path, capsys):
  path, places = tiny_imagenet(tmp_path)
  data = section('tiny_imagenet', tmp_path / 'tiny')
  with pytest.raises(ValueError, match=r'is not a folder: run python main\.py --mode=prepare .*/tiny$'):
    sources.load(data, 'train')
  folder = prepare.prepare(data, [str(path)], any_md5=True)
  found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob('*') if file.is_file()}
  assert found == places
  test = sources.load(data, 'test')
  assert test.class_names == ('n01443537', 'n01629819', 'n02002724')
  np.testing.assert_array_equal(test.labels, [0, 1, 2, 2])
  capsys.readouterr()
  prepare.prepare(data)
  assert 'is already prepared in' in capsys.readouterr().out
  (folder / 'val' / 'images').mkdir()  # as the archive itself unpacks
  with pytest.raises(ValueError, match='holds something else: give another folder'):
    prepare.prepare(data)


def publish(monkeypatch, name, paths, digests=None):
  """Makes file:// URLs of these paths the official archives of a set."""
  held = [archives.Archive(path.as_uri(), (digests or {}).get(path.name) or md5(path)) for path in paths]
  monkeypatch.setitem(archives.PUBLISHED, name, archives.PUBLISHED[name]._replace(archives=tuple(held)))


def fails(name, root, *given, match):
  with pytest.raises(ValueError, match=match) as error:
    prepare.prepare(section(name, root), given)
  assert '\n' not in str(error.value)
  assert not list(pathlib.Path(root).glob('*/[0-9]*.[0-9]*.[0-9]/'))


def test_archives_are_downloaded_once_and_checked(tmp_path, monkeypatch, capsys):
  (tmp_path / 'web').mkdir()
  paths, splits = svhn(tmp_path / 'web')
  publish(monkeypatch, 'svhn_cropped', paths, {'test_32x32.mat': '0' * 32})
  fails('svhn_cropped', tmp_path, match=r'test_32x32\.mat gave a file with the md5 \w+, not 0+: try again, or')
  assert sorted(p.name for p in (tmp_path / 'downloads').iterdir()) == ['train_32x32.mat']
  publish(monkeypatch, 'svhn_cropped', paths)
  capsys.readouterr()
  prepare.prepare(section('svhn_cropped', tmp_path))
  said = capsys.readouterr().out
  assert f'{tmp_path}/downloads/train_32x32.mat already exists' in said.replace('\n', '')
  assert f'downloading {paths[1].as_uri()} to' in said
  check('svhn_cropped', tmp_path, splits)


def test_without_a_network_the_error_names_the_url_and_the_local_copy(tmp_path, monkeypatch):
  def no_network(*_, **__):
    raise urllib.error.URLError('no route to host')

  monkeypatch.setattr('urllib.request.urlopen', no_network)
  fails(
    'cifar10',
    tmp_path,
    match=r'^https://www\.cs\.toronto\.edu/~kriz/cifar-10-binary\.tar\.gz cannot be downloaded \(no route to host\): '
    r'try again, or download it elsewhere and append the paths of all archives to this command: '
    r'cifar-10-binary\.tar\.gz$',
  )


def test_a_given_archive_is_checked(tmp_path, monkeypatch):
  [path], splits = cifar10(tmp_path)
  fails('cifar10', tmp_path, str(path), match=r'has the md5 \w{32}, but cifar-10-binary.tar.gz has c32a1d.*--any_md5')
  fails('cifar10', tmp_path, str(path) + 'x', match='is not a file: give a copy of https://www.cs.toronto.edu')
  fails('svhn_cropped', tmp_path, 'a.mat', match='must be one file per archive .*: train_32x32.mat test_32x32.mat')
  publish(monkeypatch, 'cifar10', [path])
  prepare.prepare(section('cifar10', tmp_path), [str(path)])
  check('cifar10', tmp_path, splits)


@pytest.mark.parametrize(
  ('files', 'match'),
  [
    (None, 'cannot be read'),
    ({'cifar-10-batches-bin/readme.html': b''}, r'cifar-10-batches-bin/batches\.meta\.txt is missing'),
    ({'test_batch.bin': b'x' * 3072}, 'cannot be read .*reshape'),
    ({'test_batch.bin': b'\x0a' + b'x' * 3072}, 'label 10 is not one of 10 classes'),
  ],
)
def test_another_layout_is_refused(files, match, tmp_path, monkeypatch):
  path = tmp_path / 'cifar-10-binary.tar.gz'
  if files is None:
    path.write_bytes(b'<html>not found</html>')
  elif 'test_batch.bin' in files:
    root = 'cifar-10-batches-bin/'
    good = {f'{root}data_batch_{k}.bin': bytes(3073) for k in range(1, 6)}
    names = {f'{root}batches.meta.txt': '\n'.join(CIFAR10).encode()}
    tar(path, good | names | {root + name: content for name, content in files.items()})
  else:
    tar(path, files)
  publish(monkeypatch, 'cifar10', [path])
  fails('cifar10', tmp_path, str(path), match=match)


@pytest.mark.parametrize(
  'content', [b'', b'<html>not found</html>', b'\x00' * 200, b'\x89HDF\r\n' + b'\x02' * 200, 'X']
)
def test_a_damaged_mat_file_is_refused(content, tmp_path):
  train, test = svhn(tmp_path)[0]
  if isinstance(content, bytes):
    train.write_bytes(content)
  else:
    scipy.io.savemat(train, {'X': np.zeros((2, 2)), 'y': np.zeros((2, 1))})
  with pytest.raises(ValueError, match=r'train_32x32\.mat .* cannot be read \(.*\): give the official file$') as error:
    prepare.prepare(section('svhn_cropped', tmp_path), [str(train), str(test)], any_md5=True)
  assert '\n' not in str(error.value)


def test_a_folder_with_something_else_is_refused_before_the_download(tmp_path):
  file = tmp_path / 'cifar10' / prepare.TFDS['cifar10'][0] / 'notes.txt'
  file.parent.mkdir(parents=True)
  file.write_text('mine')
  with pytest.raises(ValueError, match=r'cifar10/3\.0\.2 holds something else: remove it, or give another folder'):
    prepare.prepare(section('cifar10', tmp_path), [str(tmp_path / 'absent.tar.gz')])


def test_a_folder_that_cannot_be_written_is_refused_before_the_download(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  for name in ('cifar10', 'tiny_imagenet'):
    fails(name, tmp_path / 'file' / 'sets', match=r'/file.* cannot be written \(.*\): give another folder, --config')


def test_a_second_process_waits_for_the_first_and_uses_its_set(tmp_path, monkeypatch, capfd):
  """Otherwise, it would empty the folder in which the first one writes."""
  [path], splits = cifar10(tmp_path)
  write, second, said = prepare._write_metadata, [], ['']
  run = lambda: prepare.prepare(section('cifar10', tmp_path / 'sets'), [str(path)], any_md5=True)

  def interfered(*given):
    second.append(threading.Thread(target=run))
    second[0].start()
    until = time.monotonic() + 60
    while 'waiting for it' not in said[0]:
      assert time.monotonic() < until
      time.sleep(0.01)
      said[0] += capfd.readouterr().out
    write(*given)

  monkeypatch.setattr(prepare, '_write_metadata', interfered)
  run()
  second[0].join(60)
  assert len(second) == 1 and 'already prepared' in said[0] + capfd.readouterr().out
  check('cifar10', tmp_path / 'sets', splits)


def test_a_set_in_another_format_or_without_archives_is_refused(tmp_path):
  [path], _ = cifar10(tmp_path)
  folder = prepare.prepare(section('cifar10', tmp_path), [str(path)], any_md5=True)
  info = folder / 'dataset_info.json'
  info.write_text(info.read_text().replace('array_record', 'tfrecord'))
  with pytest.raises(ValueError, match=r'in a format other than array_record: give another folder'):
    prepare.prepare(section('cifar10', tmp_path))
  for changes in ({'name': 'mnist'}, {'source': 'folder'}, {'source': 'embedded'}):
    with pytest.raises(ValueError, match=r'is not a set that --mode=prepare knows: use the config of one of cifar10, '):
      prepare.prepare({**section('cifar10', tmp_path), **changes})


def test_the_command_of_a_missing_set_prepares_it(tmp_path, monkeypatch):
  [path], splits = cifar10(tmp_path)
  publish(monkeypatch, 'cifar10', [path])
  chosen = config.load('configs/cifar10.py', [f'data.path={tmp_path}/sets'])
  with pytest.raises(ValueError, match='is not prepared in') as error:
    resolve.open_split(chosen, 'train')
  command = str(error.value).partition('run python main.py ')[2]
  assert command == f'--mode=prepare --config=configs/cifar10.py --config.data.path={tmp_path}/sets'
  flags.FLAGS.unparse_flags()
  main.main(flags.FLAGS(['main.py', '--workdir=', *command.split()], known_only=True))
  assert len(resolve.open_split(chosen, 'train')) == len(splits['train'][0])


def test_without_tfds_the_error_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
  message = r"^data.source = 'tfds' needs tensorflow-datasets: pip install -e '\.\[tfds\]'$"
  with pytest.raises(ValueError, match=message):
    prepare.prepare(section('cifar10', tmp_path))
  with pytest.raises(ValueError, match=message):
    sources.load(section('cifar10', tmp_path), 'train')


@needs_real_data
@pytest.mark.parametrize('name', ['cifar10', 'cifar100'])
def test_the_real_cifar(name, tmp_path):
  spec = importlib.util.spec_from_file_location('make_tfds', pathlib.Path(REAL) / 'make_tfds.py')
  packed = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(packed)
  train, test, labels = packed.load(name)
  train, test = train[:5000], test[:1000]  # all of them take minutes
  labels = {key: values[: len(train if key.startswith('train') else test)] for key, values in labels.items()}
  if name == 'cifar10':
    paths, splits = cifar10(tmp_path, (train, labels['train_label']), (test, labels['test_label']))
  else:
    names = [(pathlib.Path(REAL) / name / f'{kind}_label_names.txt').read_text().split() for kind in ('fine', 'coarse')]
    columns = [
      (x, labels[f'{split}_coarse'], labels[f'{split}_label']) for split, x in (('train', train), ('test', test))
    ]
    paths, splits = cifar100(tmp_path, *columns, *names)
  prepare.prepare(section(name, tmp_path), [str(path) for path in paths], any_md5=True)
  check(name, tmp_path, splits)
