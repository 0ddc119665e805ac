"""Tokenizes text with a tokenizer.json of Hugging Face, such as that of CLIP, SigLIP, GPT-2 or BERT."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ssl_jax.data.sentences import LARGEST_VOCABULARY, Vocabulary
from ssl_jax.models.bert import PAD


class Tokenizer(Vocabulary):
  """The vocabulary and rules of a tokenizer.json."""

  def __init__(self, text: str, where: str):
    self.text, self.where = text, where
    self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if len(self) > LARGEST_VOCABULARY:
      raise ValueError(
        f'data.vocabulary: {where} has {len(self):,} pieces: give one with at most {LARGEST_VOCABULARY:,}'
      )
    if PAD in self._rules.encode('a').ids:
      raise ValueError(f'data.vocabulary: {where} has {self.pieces[PAD]!r} as token {PAD}, which must be the padding')

  @classmethod
  def read(cls, path: str | os.PathLike[str]) -> 'Tokenizer':
    """Reads a tokenizer.json."""
    try:
      return cls(pathlib.Path(path).expanduser().read_text(encoding='utf-8'), str(path))
    except (UnicodeDecodeError, OSError) as error:
      raise ValueError(f'data.vocabulary = {str(path)!r} cannot be read ({error}): give a tokenizer.json') from error

  @functools.cached_property
  def _rules(self) -> Any:
    try:
      import tokenizers
    except ModuleNotFoundError:
      raise ValueError(f"data.vocabulary = {self.where!r} needs tokenizers: pip install -e '.[text]'") from None
    try:
      rules = tokenizers.Tokenizer.from_str(self.text)
      rules.encode('a')  # fails if a piece that the rules need is missing
    except Exception as error:  # the library raises nothing more specific
      reason = ' '.join(str(error).split())
      raise ValueError(f'data.vocabulary = {self.where!r} is not a tokenizer.json ({reason}): give another') from error
    rules.no_padding()
    return rules

  @functools.cached_property
  def pieces(self) -> tuple[str, ...]:  # type: ignore[override]
    """The pieces by token id; '' for unused ids."""
    found = [''] * len(self)
    for piece, number in self._rules.get_vocab().items():
      found[number] = piece
    return tuple(found)

  def __len__(self) -> int:
    return max(self._rules.get_vocab().values(), default=0) + 1

  def __reduce__(self) -> tuple[Any, ...]:
    return Tokenizer, (self.text, self.where)

  def encode(self, lines: Sequence[str], length: int) -> np.ndarray:
    """The tokens of each text, with special tokens, truncated or padded with `PAD` to `length`.  -> int32 [n, T]"""
    tokens = np.full((len(lines), length), PAD, np.int32)
    self._rules.enable_truncation(length)
    for row, found in zip(tokens, self._rules.encode_batch_fast(list(lines)), strict=True):
      row[: len(found.ids)] = found.ids
    return tokens

  def files(self) -> dict[str, str]:
    return {'tokenizer.json': self.text}
