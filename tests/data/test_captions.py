"""captions.tsv: the captions of the images in a folder."""

import numpy as np
import pytest

from ssl_jax.data import sources
from tests.data.test_sources import config, fails, pixels, save


def folder(tmp_path, text, names=('a.png', 'b.png', 'c.png')):
  for k, name in enumerate(names):
    save(tmp_path / 'train' / name, pixels(k))
  (tmp_path / 'train' / 'captions.tsv').write_bytes(text)


def test_an_image_has_one_or_more_captions(tmp_path, capsys):
  folder(tmp_path, '\ufeffa.png\tone, ü\r\nb.png\ttwo\twith a tab\na.png\tthree\n\nc.png\t four '.encode())
  source = sources.load(config('folder', tmp_path), 'train')
  assert source.captions_of(np.arange(3)) == [('one, ü', 'three'), ('two\twith a tab',), ('four',)]
  assert source.subset(np.array([2])).captions_of(np.array([0])) == [('four',)]
  assert not capsys.readouterr().err  # the file is not one that is ignored
  source.paired = True
  assert source.in_memory(8).captions_of(np.array([1])) == [('two\twith a tab',)]


def test_class_folders_may_have_captions(tmp_path):
  folder(tmp_path, b'cat/0.png\ta cat\ndog/0.png\ta dog\n', ('cat/0.png', 'dog/0.png'))
  source = sources.load(config('folder', tmp_path), 'train')
  assert source.captions_of(np.arange(2)) == [('a cat',), ('a dog',)]
  np.testing.assert_array_equal(source.labels, [0, 1])


@pytest.mark.parametrize('names', [('a.png', 'b.png'), ('cat/a.png', 'dog/b.png')])
def test_the_folder_may_be_the_current_one(tmp_path, monkeypatch, names):
  folder(tmp_path, ''.join(f'{name}\tof {name}\n' for name in names).encode(), names)
  monkeypatch.chdir(tmp_path / 'train')
  source = sources.load(config('folder', '.', train_split=''), 'train')
  assert source.captions_of(np.arange(2)) == [(f'of {name}',) for name in names]


def test_a_folder_without_captions(tmp_path):
  save(tmp_path / 'train/a.png', pixels(0))
  assert sources.load(config('folder', tmp_path), 'train').captions_of(np.array([0])) is None


@pytest.mark.parametrize(
  ('line', 'reason'),
  [
    (b'b.png two', 'it must be file<TAB>caption'),
    (b'b.png\t ', 'it must be file<TAB>caption'),
    (b'd.png\ttwo', 'there is no image d.png'),
    (b'b.png\t\xff', "'utf-8' codec can't decode"),
  ],
)
def test_a_wrong_line_is_an_error_or_left_out(tmp_path, line, reason):
  folder(tmp_path, b'a.png\tone\n' + line + b'\nc.png\tthree\n')
  fails(rf'captions\.tsv, line 2 \({reason}.*: fix or remove it, or set data\.broken=skip', config('folder', tmp_path))
  source = sources.load(config('folder', tmp_path, broken='skip'), 'train')
  source.paired = True
  assert source.captions_of(np.arange(3)) == [('one',), (), ('three',)]
  assert source.skipped == {1} and len(source.in_memory(8)) == 2


def test_an_image_without_a_caption_is_an_error_that_names_it(tmp_path):
  folder(tmp_path, b'a.png\tone\n')
  source = sources.load(config('folder', tmp_path), 'train')
  source.paired = True
  with pytest.raises(
    ValueError, match=r'train/b\.png has no readable text \(it is missing or empty\): fix or remove it'
  ):
    source.read(1)
