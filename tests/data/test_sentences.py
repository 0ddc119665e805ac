"""Tokens match the uncased tokenizer of BERT, and mistakes in files are reported early."""

import gzip
import lzma
import pathlib
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_jax.data import sentences
from tests.helpers import REAL, needs_real_data

PIECES = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'play', '##ing', '##s', 'a', '##l', '##l', 'al', '.', 'un', '##play']


@pytest.fixture
def vocabulary():
  return sentences.Vocabulary(list(dict.fromkeys(PIECES)), 'here')


def slow_words(text):
  """The basic tokenizer of Devlin et al., one character and one pass at a time."""
  cleaned = ''
  for char in text:
    category = unicodedata.category(char)
    if char in '\t\n\r' or category == 'Zs':
      cleaned += ' '
    elif not (category.startswith('C') or char == '\ufffd'):
      code = ord(char)
      blocks = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)]
      blocks += [(0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]
      cleaned += f' {char} ' if any(a <= code <= b for a, b in blocks) else char
  found = []
  for word in cleaned.split(' '):
    plain = ''.join(c for c in unicodedata.normalize('NFD', word.lower()) if unicodedata.category(c) != 'Mn')
    part = ''
    for char in plain:
      code = ord(char)
      ascii_mark = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
      if ascii_mark or unicodedata.category(char).startswith('P'):
        found += [part, char]
        part = ''
      else:
        part += char
    found.append(part)
  return [word for word in found if word]


def test_words_are_lower_case_without_accents_and_marks_are_separate():
  assert sentences.words("Café—naïve: don't $5^2\t中文\u200b!") == (
    ['cafe', '—', 'naive', ':', 'don', "'", 't', '$', '5', '^', '2', '中', '文', '!']
  )


# NFD and lower case may change the category of characters for private use and of surrogates, which are left out.
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(categories=('L', 'M', 'N', 'P', 'S', 'Zs', 'Cc', 'Cf')), max_size=40))
def test_words_match_the_slow_tokenizer(text):
  assert sentences.words(text) == slow_words(text)


def test_the_longest_piece_comes_first(vocabulary):
  number = {piece: k for k, piece in enumerate(vocabulary.pieces)}
  found = vocabulary.encode(['Playing all unplays.', 'a', 'played'], 10)
  assert found.dtype == np.uint16
  expected = [
    ['[CLS]', 'play', '##ing', 'al', '##l', 'un', '##play', '##s', '.', '[SEP]'],
    ['[CLS]', 'a', '[SEP]', *['[PAD]'] * 7],
    ['[CLS]', '[UNK]', '[SEP]', *['[PAD]'] * 7],  # no piece continues with 'ed', so the whole word is unknown
  ]
  np.testing.assert_array_equal(found, [[number[piece] for piece in row] for row in expected])


def test_long_sentences_are_truncated_and_end_with_sep(vocabulary):
  tokens = vocabulary.encode(['a ' * 50], 6)[0]
  assert [vocabulary.pieces[k] for k in tokens] == ['[CLS]', 'a', 'a', 'a', 'a', '[SEP]']


def test_a_word_of_more_than_a_hundred_characters_is_unknown(vocabulary):
  pieces = lambda text: [vocabulary.pieces[k] for k in vocabulary.encode([text], 128)[0] if k]
  assert pieces('a' + 'l' * 99) == ['[CLS]', 'al', *['##l'] * 98, '[SEP]']
  assert pieces('a' + 'l' * 100) == ['[CLS]', '[UNK]', '[SEP]']


def test_a_vocabulary_built_from_sentences_does_not_depend_on_their_order():
  lines = ['the cat sat.', 'the dog ran', 'a cat ran away']
  made = sentences.Vocabulary.of(lines, size=60)
  assert made.pieces == sentences.Vocabulary.of(lines[::-1], size=60).pieces
  assert made.pieces[:4] == ('[PAD]', '[UNK]', '[CLS]', '[SEP]')
  assert {'the', 'cat', 'ran'} < set(made.pieces) and len(made) <= 60
  unknown = made.pieces.index('[UNK]')
  small = sentences.Vocabulary.of(lines, size=35)  # too small for rare words, which are spelled
  assert 'away' not in small.pieces
  assert unknown not in small.encode(['away'], 12)
  assert unknown in made.encode(['zebra'], 12)


def test_files_are_read_plain_or_compressed(tmp_path):
  text = 'Ein Satz.\n\n  Zwei Sätze.  \n'
  (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
  with lzma.open(tmp_path / 'a.txt.xz', 'wb') as file:
    file.write(text.encode())
  with gzip.open(tmp_path / 'a.txt.gz', 'wb') as file:
    file.write(text.encode())
  for name in ('a.txt', 'a.txt.xz', 'a.txt.gz'):
    assert list(sentences.read(tmp_path / name)) == ['Ein Satz.', 'Zwei Sätze.']


def test_broken_files_are_reported_with_a_fix(tmp_path):
  (tmp_path / 'empty.txt').write_text('\n \n')
  (tmp_path / 'latin.txt').write_bytes('Sätze'.encode('latin-1'))
  whole = lzma.compress(b'a sentence\n' * 1000)
  (tmp_path / 'cut.txt.xz').write_bytes(whole[:40])
  (tmp_path / 'no.txt.gz').write_bytes(b'no archive')
  for name, reason in {
    'none.txt': 'is not a file',
    'empty.txt': 'has no sentences',
    'latin.txt': 'is not a complete UTF-8 text file',
    'cut.txt.xz': 'is not a complete UTF-8 text file',
    'no.txt.gz': 'is not a complete UTF-8 text file',
  }.items():
    with pytest.raises(ValueError, match=rf'^data\.path = .*{name}.* {reason}'):
      list(sentences.read(tmp_path / name))


def test_a_wrong_vocabulary_is_rejected(tmp_path):
  file = tmp_path / 'vocab.txt'
  with pytest.raises(ValueError, match=r'^data\.vocabulary = .* is not a file'):
    sentences.Vocabulary.read(file)
  file.write_text('[PAD]\nthe\n')
  with pytest.raises(ValueError, match=r'^data\.vocabulary: .* lacks \[UNK\], \[CLS\], \[SEP\]'):
    sentences.Vocabulary.read(file)
  file.write_text('the\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n')
  with pytest.raises(ValueError, match=r'^data\.vocabulary: .* has \[PAD\] in line 2: it must be in line 1'):
    sentences.Vocabulary.read(file)
  file.write_bytes(b'[PAD]\n\xff\n')
  with pytest.raises(ValueError, match=r'^data\.vocabulary = .* is not UTF-8 text'):
    sentences.Vocabulary.read(file)


def test_a_vocabulary_file_keeps_its_numbers(tmp_path, vocabulary):
  file = tmp_path / 'vocab.txt'
  file.write_text('\n'.join(vocabulary.pieces) + '\n')
  assert sentences.Vocabulary.read(file).pieces == vocabulary.pieces


@needs_real_data
def test_real_sentences_have_few_unknown_words():
  lines = list(sentences.read(pathlib.Path(REAL) / 'text' / 'sentences_en.txt.xz'))
  assert len(lines) == 260_000
  made = sentences.Vocabulary.of(lines[:5000])
  tokens = made.encode(lines[5000:6000], 32)
  assert (tokens[:, 0] == 2).all() and ((tokens == 3).sum(axis=1) == 1).all()
  assert (tokens == 1).mean() < 0.001
