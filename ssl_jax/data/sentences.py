"""Sentences as token ids, from a file with one sentence per line. The default tokenizer is BERT's uncased WordPiece.

    source = load(config.data)  # .items: uint16 [N, T], .vocabulary
    tokens = source.vocabulary.encode(['Two dogs run.'], 32)  # uint16 [1, 32]

With a tokenizer.json as `data.vocabulary`, token ids are int32.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ssl_jax.data import sources
from ssl_jax.models.bert import PAD

SPECIAL = ('[PAD]', '[UNK]', '[CLS]', '[SEP]')
LARGEST_VOCABULARY = np.iinfo(np.uint16).max  # pieces
BERT_SIZE = 30522  # entries of uncased BERT's vocabulary
CHARACTERS = 1000  # most frequent characters in a vocabulary built from data, to spell rare words
LONGEST_WORD = 100  # in characters; longer words become [UNK]
OPENERS: dict[str, Callable] = {'.xz': lzma.open, '.gz': gzip.open}

_MARKS = frozenset('$+<=>^`|~')  # ASCII punctuation that Unicode classifies as symbols
# Ranges of scripts without spaces, in which each character is a word.
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))


class Vocabulary:
  """A WordPiece vocabulary. Token ids are positions in `pieces`. A piece that continues a word begins with '##'."""

  def __init__(self, pieces: Sequence[str], where: str):
    self.pieces = tuple(pieces)
    self._number = {piece: number for number, piece in enumerate(self.pieces)}
    if missing := [piece for piece in SPECIAL if piece not in self._number]:
      raise ValueError(f'data.vocabulary: {where} lacks {", ".join(missing)}: give the vocab.txt of a BERT')
    if self._number['[PAD]'] != PAD:
      raise ValueError(f'data.vocabulary: {where} has [PAD] in line {self._number["[PAD]"] + 1}: it must be in line 1')
    if len(self) > LARGEST_VOCABULARY:
      raise ValueError(
        f'data.vocabulary: {where} has {len(self):,} pieces: give one with at most {LARGEST_VOCABULARY:,}'
      )
    self._pieces_of = functools.lru_cache(maxsize=2**17)(self._split)  # most words occur many times
    self.digest = hashlib.blake2b('\n'.join(self.pieces).encode(), digest_size=8).hexdigest()

  def __len__(self) -> int:
    return len(self.pieces)

  def __reduce__(self) -> tuple[Any, ...]:  # for worker processes: the cache cannot be pickled
    return type(self), (self.pieces, 'the vocabulary')

  @classmethod
  def read(cls, path: str | os.PathLike[str]) -> 'Vocabulary':
    """Reads a vocab.txt with one piece per line, or a tokenizer.json."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
      raise ValueError(
        f'data.vocabulary = {str(path)!r} is not a file: give the vocab.txt of a BERT, a tokenizer.json, or nothing'
      )
    if file.suffix == '.json':
      from ssl_jax.data.tokenizer import Tokenizer  # not at the top: it imports this module

      return Tokenizer.read(path)
    try:
      return cls(file.read_text(encoding='utf-8-sig').rstrip('\n').split('\n'), str(path))
    except UnicodeDecodeError as error:
      raise ValueError(f'data.vocabulary = {str(path)!r} is not UTF-8 text ({error}): give a vocab.txt') from error

  @classmethod
  def of(cls, lines: Iterable[str], size: int = BERT_SIZE) -> 'Vocabulary':
    """The most frequent characters, to start and to continue a word, followed by the most frequent words."""
    counts = collections.Counter(word for line in lines for word in words(line))
    characters: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
      characters.update(dict.fromkeys(word, count))
    # Break ties alphabetically, so that the order of the lines does not matter.
    frequent = lambda counter: [x for x, _ in sorted(counter.items(), key=lambda item: (-item[1], item[0]))]
    single = frequent(characters)[:CHARACTERS]
    pieces = dict.fromkeys([*SPECIAL, *single, *(f'##{c}' for c in single), *frequent(counts)])
    return cls(list(pieces)[:size], 'the vocabulary of the sentences')

  def encode(self, lines: Sequence[str], length: int) -> np.ndarray:
    """[CLS], the pieces of each sentence (truncated), [SEP], and [PAD] up to `length`.  -> uint16 [n, T]"""
    tokens = np.full((len(lines), length), PAD, np.uint16)
    first, last = self._number['[CLS]'], self._number['[SEP]']
    for row, line in zip(tokens, lines, strict=True):
      found = [piece for word in words(line) for piece in self._pieces_of(word)][: length - 2]
      row[: len(found) + 2] = [first, *found, last]
    return tokens

  def files(self) -> dict[str, str]:
    """{file name: content} of the files from which `read` restores the vocabulary."""
    return {'vocab.txt': '\n'.join(self.pieces) + '\n'}

  def _split(self, word: str) -> tuple[int, ...]:
    """Splits a word greedily into the longest matching pieces; [UNK] if no piece matches.  -> token ids"""
    unknown = (self._number['[UNK]'],)
    if len(word) > LONGEST_WORD:
      return unknown
    found: list[int] = []
    start = 0
    while start < len(word):
      ends = range(len(word), start, -1)
      candidates = (('##' if start else '') + word[start:end] for end in ends)
      end, piece = next(((end, p) for end, p in zip(ends, candidates, strict=True) if p in self._number), (0, ''))
      if not piece:
        return unknown
      found.append(self._number[piece])
      start = end
    return tuple(found)


class _Spacing(dict[int, str]):
  """The replacement of each character, applied before the text is split at spaces. Computed on first use."""

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
  """Lowercase words without accents, with punctuation marks as separate words, as in BERT's uncased tokenizer."""
  return unicodedata.normalize('NFD', text.lower()).translate(_SPACING).split()


class Sentences(sources.Source):
  """Items are token ids, [N, T]: uint16, or int32 from a tokenizer.json. There are no labels."""

  def __init__(self, items: np.ndarray, vocabulary: Vocabulary):
    super().__init__(items)
    self.vocabulary = vocabulary

  def ready(self, length: int) -> bool:
    return self.items.shape[1:] == (length,)


def load(data: Mapping[str, Any]) -> Sentences:
  """The sentences of the file `data.path`, tokenized with `data.vocabulary` or, if empty, with one built from them."""
  vocabulary = Vocabulary.read(data['vocabulary']) if data['vocabulary'] else None  # read first, to fail early
  lines = read(data['path'])
  vocabulary = vocabulary or Vocabulary.of(lines)
  return Sentences(vocabulary.encode(lines, data['tokens']), vocabulary)


def read(path: str | os.PathLike[str]) -> list[str]:
  """The sentences of a text file, one per line. The file may be compressed (.xz, .gz). Empty lines are skipped."""
  file = pathlib.Path(path).expanduser()
  if not path or not file.is_file():
    raise ValueError(f'data.path = {str(path)!r} is not a file: give a .txt, .txt.xz or .txt.gz, one sentence per line')
  try:
    with OPENERS.get(file.suffix, open)(file, 'rt', encoding='utf-8') as text:
      lines = [line.strip() for line in text]
  except (UnicodeDecodeError, lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise ValueError(f'data.path = {str(path)!r} is not a complete UTF-8 text file ({error}): give another') from error
  if not any(lines):
    raise ValueError(f'data.path = {str(path)!r} has no sentences: give a file with one per line')
  return [line for line in lines if line]
