"""What tells images from sentences, in one object each. Nothing else in the project asks which of them a run is of."""

import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import linen as nn
from ml_collections import ConfigDict

from ssl_jax.config import flatten
from ssl_jax.data import resolve, sentences, sources, views
from ssl_jax.models import bert


class Modality:
  """One kind of examples: how they are read, viewed and checked. Encoders name the modality that they read."""

  name: str  # 'images' or 'sentences'; also what examples are called in messages
  meaningless: ClassVar[Mapping[str, Any]]  # keys without a meaning, with the value that they must have
  encoder_hint: str

  def input_size(self, config: ConfigDict) -> int:
    """The size of what the encoder takes: pixels per side, or tokens."""
    raise TypeError(f'{type(self).__name__} has no input size')

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    """How examples become views."""
    raise TypeError(f'{type(self).__name__} has no views')

  def open(self, config: ConfigDict) -> sources.Source:
    """The training examples, with nothing decoded yet."""
    raise TypeError(f'{type(self).__name__} has no source')

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    """The source in memory where it fits, and whether it is."""
    raise TypeError(f'{type(self).__name__} has no source')

  def check(self, config: ConfigDict, encoder: nn.Module) -> None:
    """Raises a ValueError for an encoder of another modality, and for keys without a meaning."""
    if encoder.modality != self.name:
      raise ValueError(
        f'model.name = {config.model.name!r} encodes {encoder.modality}, but data.source = {config.data.source!r} has '
        f'{self.name}: {self.encoder_hint}'
      )
    given = flatten(config)
    for key, value in self.meaningless.items():
      if given[key] != value:
        raise ValueError(f'{key} = {given[key]!r} has no meaning for {self.name}: set {key}={value!r}')

  def check_source(self, config: ConfigDict, encoder: nn.Module, source: sources.Source) -> None:
    """Raises a ValueError for training examples that the encoder cannot read."""

  def check_weights(self, config: ConfigDict) -> None:
    """Raises a ValueError where initial weights lack something that belongs to them."""

  def identity(self, source: sources.Source) -> dict[str, Any]:
    """What ties a checkpoint to its training examples, beside their number."""
    return {}

  def files(self, source: sources.Source) -> dict[str, str]:
    """Texts by file name that belong to the weights, and are kept in the workdir."""
    return {}


class _Images(Modality):
  name = 'images'
  meaningless: ClassVar = {'data.vocabulary': '', 'eval.sts': '', 'eval.transfer': ''}
  encoder_hint = 'set data.source=text, or give another encoder'

  def input_size(self, config: ConfigDict) -> int:
    return config.data.image_size

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    return views.image_views(config, on_device)

  def open(self, config: ConfigDict) -> sources.Source:
    return resolve.open_split(config, 'train')

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    return resolve.placed(config, source)


class _Sentences(Modality):
  name = 'sentences'
  meaningless: ClassVar = {
    'augment.name': 'dropout',
    'small_crops.number': 0,
    'imbalance.name': 'none',
    'online_probe': 0.0,
    'data.held_out': 0.0,
    'data.stored_size': 0,
    'data.cache': '',
    'data.classes': '',
    'eval.k': [],
    'eval.linear': '',
    'eval.finetune': '',
    'eval.measures': False,
    'eval.data.name': '',
  }
  encoder_hint = 'give bert_base, or another data.source'

  def input_size(self, config: ConfigDict) -> int:
    return config.data.tokens

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    return views.Views([bert.view] * config.views, bert.seen, None)

  def open(self, config: ConfigDict) -> sources.Source:
    return sentences.load(config.data)

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    return source, True  # token ids are small

  def check(self, config: ConfigDict, encoder: nn.Module) -> None:
    super().check(config, encoder)
    if further := [key for key in flatten(config) if key.startswith('augment') and key != 'augment.name']:
      raise ValueError(f'{further[0]} has no meaning for sentences: leave it out, or set model.dropout')
    if config.data.on_device == 'no':
      raise ValueError("data.on_device = 'no' has no meaning for sentences: set data.on_device='auto'")
    for key, known in (('sts', 'sts12.tsv, stsb.tsv'), ('transfer', 'mr.tsv, trec.tsv')):
      if (folder := config.eval[key]) and not pathlib.Path(folder).expanduser().is_dir():
        raise ValueError(f'eval.{key} = {folder!r} is not a folder: give one with {known}, ...')

  def check_weights(self, config: ConfigDict) -> None:
    if not config.data.vocabulary:
      raise ValueError(f'init = {config.init!r} needs the vocabulary of its weights: set data.vocabulary=vocab.txt')

  def check_source(self, config: ConfigDict, encoder: nn.Module, source: sources.Source) -> None:
    assert isinstance(source, sentences.Sentences)
    if encoder.vocabulary < len(source.vocabulary):
      pieces = f'{len(source.vocabulary):,} entries of {config.data.vocabulary or "the vocabulary of the sentences"}'
      raise ValueError(f'model.vocabulary = {encoder.vocabulary} must be at least the {pieces}')

  def identity(self, source: sources.Source) -> dict[str, Any]:
    assert isinstance(source, sentences.Sentences)
    return {'words': source.vocabulary.digest}

  def files(self, source: sources.Source) -> dict[str, str]:
    assert isinstance(source, sentences.Sentences)
    return source.vocabulary.files()


IMAGES, SENTENCES = _Images(), _Sentences()


def modality_of(config: ConfigDict) -> Modality:
  """The modality of a config's `data.source`."""
  return SENTENCES if config.data.source == 'text' else IMAGES
