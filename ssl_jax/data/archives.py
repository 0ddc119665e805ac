"""The official archives of small image datasets: their URLs, their MD5 checksums, and a downloader."""

import hashlib
import http.client
import pathlib
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn

TIMEOUT = 60  # seconds without a response


class Archive(NamedTuple):
  """A file published by the authors of a dataset."""

  url: str
  md5: str

  @property
  def name(self) -> str:
    return self.url.rpartition('/')[2]


class Published(NamedTuple):
  """The archives of a dataset, and the config that trains on it."""

  config: str
  archives: tuple[Archive, ...]


_CIFAR = 'https://www.cs.toronto.edu/~kriz'
_SVHN = 'http://ufldl.stanford.edu/housenumbers'

# Keys are values of `data.name`: the tfds name, if tfds has the dataset.
PUBLISHED = {
  'cifar10': Published(
    'configs/cifar10.py', (Archive(f'{_CIFAR}/cifar-10-binary.tar.gz', 'c32a1d4ab5d03f1284b67883e8d87530'),)
  ),
  'cifar100': Published(
    'configs/cifar100.py', (Archive(f'{_CIFAR}/cifar-100-binary.tar.gz', '03b5dce01913d631647c71ecec9e9cb8'),)
  ),
  'svhn_cropped': Published(
    'configs/svhn.py',
    (
      Archive(f'{_SVHN}/train_32x32.mat', 'e26dedcc434d2e4c54c9b2d4a06d8373'),
      Archive(f'{_SVHN}/test_32x32.mat', 'eb5a983be6a315427106f1b164d9cef3'),
    ),
  ),
  'stl10': Published(
    'configs/stl10.py',
    (Archive('http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz', '91f7769df0f17e558f3565bffb0c7dfb'),),
  ),
  'tiny_imagenet': Published(
    'configs/tiny_imagenet.py',
    (Archive('http://cs231n.stanford.edu/tiny-imagenet-200.zip', '90528d7ca1a48142e341f4ef8d21d0de'),),
  ),
}


def command(name: str, path: str = '') -> str:
  """The command that prepares a dataset in `data.path`.

  >>> command('svhn_cropped')
  'python main.py --mode=prepare --config=configs/svhn.py'
  """
  return f'python main.py --mode=prepare --config={PUBLISHED[name].config}' + (
    f' --config.data.path={path}' if path else ''
  )


def fetch(name: str, given: Sequence[str], downloads: pathlib.Path, any_md5: bool = False) -> list[pathlib.Path]:
  """Paths of the archives of a dataset: the `given` files, or downloads into the folder `downloads`, checked by MD5."""
  archives = PUBLISHED[name].archives
  names = ' '.join(archive.name for archive in archives)
  if not given:
    return [_download(archive, downloads, names) for archive in archives]
  if len(given) != len(archives):
    raise ValueError(f'{" ".join(given)!r} must be one file per archive of {name!r}, in this order: {names}')
  files = [pathlib.Path(path).expanduser() for path in given]
  for archive, file in zip(archives, files, strict=True):
    if not file.is_file():
      raise ValueError(f'{str(file)!r} is not a file: give a copy of {archive.url}, or leave it out to download it')
    if not any_md5 and (found := _md5(file)) != archive.md5:
      raise ValueError(
        f'{str(file)!r} has the md5 {found}, but {archive.name} has {archive.md5}: give the official file, or add '
        '--any_md5 to use this one'
      )
  return files


def _download(archive: Archive, folder: pathlib.Path, names: str) -> pathlib.Path:
  """Downloads an archive unless the folder already has it. `names` lists all archives of the dataset, for errors."""
  file = folder / archive.name
  if file.is_file() and _md5(file) == archive.md5:
    print(f'{file} already exists')
    return file
  folder.mkdir(parents=True, exist_ok=True)
  part = file.with_name(file.name + '.part')
  fix = f'try again, or download it elsewhere and append the paths of all archives to this command: {names}'
  print(f'downloading {archive.url} to {file}')
  columns = (TextColumn(archive.name), DownloadColumn(), TimeRemainingColumn())
  try:
    with urllib.request.urlopen(archive.url, timeout=TIMEOUT) as answer, Progress(*columns) as progress:
      length = answer.headers.get('Content-Length')
      task = progress.add_task('', total=int(length) if length else None)
      with part.open('wb') as target:
        while chunk := answer.read(2**20):
          target.write(chunk)
          progress.update(task, advance=len(chunk))
  except (OSError, http.client.HTTPException) as error:  # urllib's errors are OSErrors
    reason = getattr(error, 'reason', None) or error
    raise ValueError(f'{archive.url} cannot be downloaded ({reason}): {fix}') from error
  if (found := _md5(part)) != archive.md5:
    part.unlink()
    raise ValueError(f'{archive.url} gave a file with the md5 {found}, not {archive.md5}: {fix}')
  return part.replace(file)


def _md5(file: pathlib.Path) -> str:
  with file.open('rb') as content:
    return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
