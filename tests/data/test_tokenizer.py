"""A tokenizer.json gives the tokens that its own library gives; a vocab.txt gives those of the same library, too."""

import json
import pickle
import sys
import types

import numpy as np
import pytest

from configs import base
from ssl_jax.data import sentences
from ssl_jax.data.tokenizer import Tokenizer
from ssl_jax.reporting import export
from tests.helpers import REAL, needs_real_data

tokenizers = pytest.importorskip('tokenizers')
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402

LINES = ["Two dogs don't run — naïve, café!", 'a red circle, on the left', '中文 and more: $5^2', '', 'word ' * 50]


def bert(vocabulary, path):
  """The tokenizer.json of a BERT with these pieces."""
  number = {piece: k for k, piece in enumerate(vocabulary.pieces)}
  rules = tokenizers.Tokenizer(models.WordPiece(number, unk_token='[UNK]', max_input_chars_per_word=100))
  rules.normalizer = normalizers.BertNormalizer(lowercase=True)
  rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  ends = [(piece, number[piece]) for piece in ('[CLS]', '[SEP]')]
  rules.post_processor = processors.TemplateProcessing('[CLS] $A [SEP]', special_tokens=ends)
  rules.enable_padding(length=7)  # which is ours to decide
  rules.save(str(path))
  return path


def clip(path, first='!'):
  """A tokenizer.json like CLIP's: bytes, no padding, a start and an end."""
  known = [first, *(piece for piece in sorted(pre_tokenizers.ByteLevel.alphabet()) if piece != first)]
  known += ['<start>', '<end>']
  number = {piece: k for k, piece in enumerate(known)}
  rules = tokenizers.Tokenizer(models.BPE(number, []))
  rules.pre_tokenizer, rules.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  ends = [(piece, number[piece]) for piece in ('<start>', '<end>')]
  rules.post_processor = processors.TemplateProcessing('<start> $A <end>', special_tokens=ends)
  rules.save(str(path))
  return path


@pytest.mark.parametrize('length', [3, 12, 40])
def test_a_vocab_txt_gives_the_tokens_of_the_library(tmp_path, length):
  own = sentences.Vocabulary.of(LINES, size=80)
  (tmp_path / 'vocab.txt').write_text(own.files()['vocab.txt'])
  read = sentences.Vocabulary.read(tmp_path / 'vocab.txt')
  library = sentences.Vocabulary.read(bert(own, tmp_path / 'tokenizer.json'))
  assert isinstance(library, Tokenizer) and library.pieces == read.pieces and len(library) == len(read)
  found = library.encode(LINES, length)
  assert found.dtype == np.int32 and found.shape == (5, length)
  np.testing.assert_array_equal(found, read.encode(LINES, length))


@needs_real_data
def test_real_sentences_have_the_tokens_of_the_library(tmp_path):
  lines = sentences.read(f'{REAL}/text/sentences_en.txt.xz')[:5000]
  own = sentences.Vocabulary.of(lines, size=5000)
  library = Tokenizer.read(bert(own, tmp_path / 'tokenizer.json'))
  np.testing.assert_array_equal(library.encode(lines, 64), own.encode(lines, 64))


def test_start_and_end_stay_and_the_rest_is_padded(tmp_path):
  made = Tokenizer.read(clip(tmp_path / 'tokenizer.json'))
  start, end = made.pieces.index('<start>'), made.pieces.index('<end>')
  a, b = made.pieces.index('a'), made.pieces.index('b')
  np.testing.assert_array_equal(made.encode(['ab', 'ab' * 9, ''], 6), [
    [start, a, b, end, 0, 0], [start, a, b, a, b, end], [start, end, 0, 0, 0, 0]
  ])  # fmt: skip
  np.testing.assert_array_equal(made.encode(['ab' * 9], 4), [[start, a, b, end]])
  copy = pickle.loads(pickle.dumps(made))  # as workers get it
  np.testing.assert_array_equal(copy.encode(['ab'], 4), made.encode(['ab'], 4))
  (tmp_path / 'again.json').write_text(made.files()['tokenizer.json'])
  assert sentences.Vocabulary.read(tmp_path / 'again.json').digest == made.digest


def test_wrong_files_are_refused(tmp_path, monkeypatch):
  file = tmp_path / 'tokenizer.json'
  for content in ('{}', 'nothing', json.dumps({'model': {'type': 'unknown'}})):
    file.write_text(content)
    with pytest.raises(ValueError, match=r'data\.vocabulary = .*tokenizer\.json. is not a tokenizer\.json') as error:
      sentences.Vocabulary.read(file)
    assert '\n' not in str(error.value)
  tokenizers.Tokenizer(models.WordLevel({'b': 0}, unk_token='[UNK]')).save(str(file))  # which lacks [UNK]
  with pytest.raises(ValueError, match=r'is not a tokenizer\.json \(.*\): give another'):
    sentences.Vocabulary.read(file)
  file.write_bytes(b'\xff')
  with pytest.raises(ValueError, match='cannot be read'):
    sentences.Vocabulary.read(file)
  with pytest.raises(ValueError, match="has 'a' as token 0, which must be the padding"):
    Tokenizer.read(clip(file, first='a'))
  clip(file)
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with pytest.raises(ValueError, match=r"needs tokenizers: pip install -e '\.\[text\]'"):
    sentences.Vocabulary.read(file)


def test_sentences_are_read_with_a_tokenizer(tmp_path):
  (tmp_path / 'lines.txt').write_text('one\ntwo\n')
  data = dict(path=str(tmp_path / 'lines.txt'), vocabulary=str(clip(tmp_path / 'tokenizer.json')), tokens=8)
  source = sentences.load(data)
  np.testing.assert_array_equal(source.items, source.vocabulary.encode(['one', 'two'], 8))
  assert source.ready(8) and set(source.vocabulary.files()) == {'tokenizer.json'}


def test_an_export_has_the_file_that_was_used():
  chosen = base.get_config()
  for name, file in {'': 'vocab.txt', 'my/vocab.txt': 'vocab.txt', 'my/tokenizer.json': 'tokenizer.json'}.items():
    chosen.data.vocabulary = name
    notes = export.NOTES['sentences'](chosen, types.SimpleNamespace(pooling='cls'))
    assert notes.files == (file,) and file in notes.torch and file in notes.flags
