"""Turns the captions of a source into tokens: vocabulary, tokenization, and random choice of one caption per step."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.data import sources
from ssl_jax.data.sentences import Vocabulary
from ssl_jax.models import bert

COUNTED = 1_000_000  # maximum number of images whose captions a vocabulary is built from
AT_ONCE = 10_000  # images whose captions are read in one call


class Tokens(NamedTuple):
  """The tokenized captions of N images, in memory."""

  tokens: np.ndarray  # uint16 [N, C, T], with up to C captions per image; the rest is padding
  number: np.ndarray  # int32 [N], the number of captions of each image


@dataclasses.dataclass(frozen=True)
class Reader:
  """Draws one caption per image and tokenizes it, on the host."""

  vocabulary: Vocabulary
  length: int

  def __call__(self, source: sources.Source, positions: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Positions [b], uniform random numbers in [0, 1) [b] -> tokens [b, 1, T]: one view."""
    found = source.captions_of(positions)
    assert found is not None
    chosen = [texts[int(u * len(texts))] if texts else '' for texts, u in zip(found, uniforms, strict=True)]
    return self.vocabulary.encode(chosen, self.length)[:, None]


def vocabulary_of(data: Mapping[str, Any], source: sources.Source) -> Vocabulary:
  """The vocabulary in the file `data.vocabulary` or, if none is given, one built from the captions."""
  if data['vocabulary']:
    return Vocabulary.read(data['vocabulary'])
  counted = _captions(source, min(len(source), COUNTED))
  return Vocabulary.of(itertools.chain.from_iterable(counted))


def tokens_of(source: sources.Source, vocabulary: Vocabulary, length: int) -> Tokens:
  """The tokens of every caption of a source."""
  found = list(_captions(source, len(source)))
  count = np.array([len(texts) for texts in found], np.int32)
  tokens = np.zeros((len(found), count.max(initial=1), length), np.uint16)
  tokens[np.arange(tokens.shape[1])[None] < count[:, None]] = vocabulary.encode(
    [*itertools.chain.from_iterable(found)], length
  )
  return Tokens(tokens, count)


def view(key: jax.Array, example: Mapping[str, jax.Array]) -> jax.Array:
  """The tokens of a random caption of an example, followed by a dropout key.  -> uint32 [T + 2]"""
  drawn = jax.random.randint(jax.random.fold_in(key, 0), (), 0, jnp.maximum(example['number'], 1))
  return bert.view(jax.random.fold_in(key, 1), example['tokens'][drawn])


def _captions(source: sources.Source, count: int) -> Iterator[tuple[str, ...]]:
  """The captions of the first `count` images, one tuple per image."""
  for start in range(0, count, AT_ONCE):
    found: Sequence[tuple[str, ...]] | None = source.captions_of(np.arange(start, min(start + AT_ONCE, count)))
    assert found is not None
    yield from found
