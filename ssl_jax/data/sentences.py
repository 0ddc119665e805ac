"""Sentences as token ids: a file with one sentence a line, and BERT's uncased WordPiece.

source = load(config.data)  # .items: uint16 [N, T], .vocabulary
tokens = source.vocabulary.encode(['Two dogs run.'], 32)  # uint16 [1, 32]
"""

import collections
import functools
import gzip
import hashlib
import lzma
import os
import pathlib
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ssl_jax.data import sources

PAD = 0  # the token that fills a sentence up, as BERT numbers it
SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]')
BERT_SIZE = 30522  # entries of BERT's uncased vocabulary
CHARACTERS = 1000  # the most frequent ones, that a vocabulary of our own can spell any word with
LONGEST_WORD = 100  # characters; a longer one is unknown
OPENERS = {'.xz': lzma.open, '.gz': gzip.open}

_MARKS = frozenset('$+<=>^`|~')  # of ASCII, which Unicode calls symbols
# Written without spaces: each character is a word.
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))


class Vocabulary:
  """The pieces that words are made of, each with its number; a piece that goes on with a word begins with '##'."""

  def __init__(self, pieces: Sequence[str], where: str):
    self.pieces = tuple(pieces)
    self._number = {piece: number for number, piece in enumerate(self.pieces)}
    if missing := [piece for piece in SPECIAL if piece not in self._number]:
      raise ValueError(f'data.vocabulary: {where} lacks {", ".join(missing)}: give a vocab.txt of BERT, a piece a line')
    if self._number['[PAD]'] != PAD:
      raise ValueError(f'data.vocabulary: {where} has [PAD] in line {self._number["[PAD]"] + 1}: it must be the first')
    if len(self) > np.iinfo(np.uint16).max:
      raise ValueError(
        f'data.vocabulary: {where} has {len(self):,} pieces: give one of at most {np.iinfo(np.uint16).max:,}'
      )
    self._pieces_of = functools.cache(self._split)  # words come again and again
    self.digest = hashlib.blake2b('\n'.join(self.pieces).encode(), digest_size=8).hexdigest()

  def __len__(self):
    return len(self.pieces)

  @classmethod
  def read(cls, path: str | os.PathLike) -> 'Vocabulary':
    """Of a vocab.txt, a piece a line."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
      raise ValueError(f'data.vocabulary = {str(path)!r} is no file: give a vocab.txt of BERT, or nothing')
    try:
      return cls(file.read_text(encoding='utf-8-sig').rstrip('\n').split('\n'), str(path))
    except UnicodeDecodeError as error:
      raise ValueError(f'data.vocabulary = {str(path)!r} is no text ({error}): give a vocab.txt of BERT') from error

  @classmethod
  def of(cls, lines: Iterable[str], size: int = BERT_SIZE) -> 'Vocabulary':
    """The most frequent characters, at the start of a word and within one, then the most frequent words."""
    counts = collections.Counter(word for line in lines for word in words(line))
    characters = collections.Counter()
    for word, count in counts.items():
      characters.update(dict.fromkeys(word, count))
    # Of equally many the first in the alphabet, whatever the order of the lines.
    frequent = lambda counter: [x for x, _ in sorted(counter.items(), key=lambda item: (-item[1], item[0]))]
    single = frequent(characters)[:CHARACTERS]
    pieces = dict.fromkeys([*SPECIAL, *single, *(f'##{c}' for c in single), *frequent(counts)])
    return cls(list(pieces)[:size], 'the vocabulary of these sentences')

  def encode(self, lines: Sequence[str], length: int) -> np.ndarray:
    """[CLS], the pieces of each sentence, as many as there is room for, [SEP], and [PAD] to the end.  uint16 [n, T]"""
    tokens = np.full((len(lines), length), PAD, np.uint16)
    first, last = self._number['[CLS]'], self._number['[SEP]']
    for row, line in zip(tokens, lines, strict=True):
      found = [piece for word in words(line) for piece in self._pieces_of(word)][: length - 2]
      row[: len(found) + 2] = [first, *found, last]
    return tokens

  def _split(self, word: str) -> tuple[int, ...]:
    """The longest piece that the word begins with, then the longest that goes on; an unknown word has one number."""
    unknown = (self._number['[UNK]'],)
    if len(word) > LONGEST_WORD:
      return unknown
    found, start = [], 0
    while start < len(word):
      ends = range(len(word), start, -1)
      candidates = (('##' if start else '') + word[start:end] for end in ends)
      end, piece = next(((end, p) for end, p in zip(ends, candidates, strict=True) if p in self._number), (0, ''))
      if not piece:
        return unknown
      found.append(self._number[piece])
      start = end
    return tuple(found)


class _Spacing(dict):
  """Of each character, what stands for it before words are parted at spaces; filled as characters come."""

  def __missing__(self, code: int) -> str:
    char, category = chr(code), unicodedata.category(chr(code))
    if category == 'Zs' or char in '\t\n\r':
      kept = ' '
    elif category == 'Mn' or category[0] == 'C' or char == '\ufffd':  # accents, control characters
      kept = ''
    else:
      alone = category[0] == 'P' or char in _MARKS or any(low <= code <= high for low, high in _IDEOGRAPHS)
      kept = f' {char} ' if alone else char
    self[code] = kept
    return kept


_SPACING = _Spacing()


def words(text: str) -> list[str]:
  """Lower-case words without accents, each punctuation mark a word of its own, as BERT's uncased tokenizer has them."""
  return unicodedata.normalize('NFD', text.lower()).translate(_SPACING).split()


class Sentences(sources.Source):
  """Items are token ids, uint16 [N, T]. There are no labels."""

  def __init__(self, items: np.ndarray, vocabulary: Vocabulary):
    super().__init__(items)
    self.vocabulary = vocabulary

  def ready(self, length):
    return self.items.shape[1:] == (length,)


def load(data: Mapping) -> Sentences:
  """The sentences of the file `data.path`, as tokens of `data.vocabulary` or of a vocabulary of their own."""
  vocabulary = Vocabulary.read(data['vocabulary']) if data['vocabulary'] else None  # a mistake is told at once
  lines = read(data['path'])
  vocabulary = vocabulary or Vocabulary.of(lines)
  return Sentences(vocabulary.encode(lines, data['tokens']), vocabulary)


def read(path: str | os.PathLike) -> list[str]:
  """The sentences of a file, one a line, plain or packed (.xz, .gz); empty lines are none."""
  file = pathlib.Path(path).expanduser()
  if not path or not file.is_file():
    raise ValueError(f'data.path = {str(path)!r} is no file: give one with a sentence a line (.txt, .txt.xz, .txt.gz)')
  try:
    with OPENERS.get(file.suffix, open)(file, 'rt', encoding='utf-8') as text:
      lines = [line.strip() for line in text]
  except (UnicodeDecodeError, lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise ValueError(f'data.path = {str(path)!r} is no whole text file ({error}): give one of UTF-8') from error
  if not any(lines):
    raise ValueError(f'data.path = {str(path)!r} holds no sentence: give one a line')
  return [line for line in lines if line]
