"""The modalities of training examples: images, sentences, and image-text pairs, as objects with one interface."""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from ml_collections import ConfigDict

from ssl_jax.config import flatten
from ssl_jax.data import captions, resolve, sentences, sources, views
from ssl_jax.models import bert
from ssl_jax.registry import require

IMAGE_TEXT = 'image_text'  # the method that trains on images with captions


class Modality:
  """A kind of training example: how examples are loaded, turned into views and checked."""

  name: str  # 'images', 'sentences' or 'pairs'; also used in messages
  encoded: str  # what the main encoder must encode: 'images' or 'sentences'
  meaningless: ClassVar[Mapping[str, Any]]  # config keys that do not apply, with the only value that is accepted
  encoder_hint: str

  def input_size(self, config: ConfigDict) -> int:
    """The size of the encoder's input: pixels per side, or tokens."""
    raise TypeError(f'{type(self).__name__} has no input size')

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    """How examples become views."""
    raise TypeError(f'{type(self).__name__} has no views')

  def open(self, config: ConfigDict, split: str = 'train', data: Mapping[str, Any] | None = None) -> sources.Source:
    """The examples of a split, not decoded yet. `data` replaces `config.data`, for evaluations on other data."""
    raise TypeError(f'{type(self).__name__} has no source')

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    """The source, loaded into memory if it fits, and whether it was."""
    raise TypeError(f'{type(self).__name__} has no source')

  def dataset(self, source: sources.Source) -> Any:
    """The training examples as a tree of arrays [N, ...], to be put on the device. `views` act on one example."""
    return source.items

  def reader(self, config: ConfigDict, source: sources.Source) -> captions.Reader | None:
    """The function that tokenizes captions when batches come from the host; None if there are no captions."""
    return None

  def evaluates(self, config: ConfigDict) -> bool:
    """Whether any evaluation runs during training."""
    raise TypeError(f'{type(self).__name__} has no evaluations')

  def check(self, config: ConfigDict, encoder: nn.Module) -> None:
    """Raises a ValueError for an encoder of another modality, and for config keys that do not apply."""
    if encoder.modality != self.encoded:
      raise ValueError(
        f'model.name = {config.model.name!r} encodes {encoder.modality}, but data.source = {config.data.source!r} has '
        f'{self.encoded}: {self.encoder_hint}'
      )
    given = flatten(config)
    for key, value in self.meaningless.items():
      if given[key] != value:
        raise ValueError(f'{key} = {given[key]!r} does not apply to {self.name}: set {key}={value!r}')

  def check_source(self, config: ConfigDict, network: nn.Module, source: sources.Source) -> None:
    """Raises a ValueError for training examples that the encoders of the network cannot read."""

  def check_weights(self, config: ConfigDict) -> None:
    """Raises a ValueError if pretrained weights lack a file that they need, such as a vocabulary."""

  def identity(self, source: sources.Source) -> dict[str, Any]:
    """Values, apart from the number of examples, by which a checkpoint recognizes its training data."""
    return {}

  def files(self, source: sources.Source) -> dict[str, str]:
    """Text files that belong to the weights and are saved in the workdir, as {name: content}."""
    return {}


class _Images(Modality):
  name = encoded = 'images'
  meaningless: ClassVar = {'data.vocabulary': '', 'eval.sts': '', 'eval.transfer': '', 'eval.prompts': ''}
  encoder_hint = 'set data.source=text, or give another encoder'

  def input_size(self, config: ConfigDict) -> int:
    return config.data.image_size

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    return views.image_views(config, on_device)

  def open(self, config: ConfigDict, split: str = 'train', data: Mapping[str, Any] | None = None) -> sources.Source:
    return resolve.open_split(config, split, data)

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    return resolve.placed(config, source)

  def evaluates(self, config: ConfigDict) -> bool:
    during = config.eval.measures or (config.eval.linear_during and config.eval.linear)
    return bool(config.eval.k or config.online_probe or during)


def _of_image(make: views.View, key: jax.Array, example: Mapping[str, jax.Array]) -> jax.Array:
  return make(key, example['images'])


class _Pairs(_Images):
  """Images with captions. Config keys for images have the same meaning here."""

  name = 'pairs'
  meaningless: ClassVar = {
    'small_crops.number': 0,
    'eval.flip': False,
    'eval.patches': 0,
    'eval.whiten': False,
    'eval.sts': '',
    'eval.transfer': '',
  }

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    found = views.image_views(config, on_device)
    if not on_device:  # the host returns images and tokens separately
      return found._replace(training=[*found.training, bert.view])
    of_images = [functools.partial(_of_image, make) for make in found.training]
    return found._replace(training=[*of_images, captions.view])

  def open(self, config: ConfigDict, split: str = 'train', data: Mapping[str, Any] | None = None) -> sources.Source:
    source = super().open(config, split, data)
    source.paired = source.has_text()
    if data is not None:
      return source
    if not source.paired:
      raise ValueError(
        f'method.name = {config.method.name!r} needs captions, and data.source = {config.data.source!r} has none here: '
        'give a source of images with text, or another method'
      )
    source.vocabulary = captions.vocabulary_of(config.data, source)
    return source

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    placed, in_memory = super().place(config, source)
    placed.vocabulary = source.vocabulary
    if in_memory:
      placed.tokens = captions.tokens_of(placed, source.vocabulary, config.data.tokens)
    return placed, in_memory

  def dataset(self, source: sources.Source) -> Any:
    return {'images': source.items, **source.tokens._asdict()}

  def reader(self, config: ConfigDict, source: sources.Source) -> captions.Reader | None:
    return captions.Reader(source.vocabulary, config.data.tokens)

  def evaluates(self, config: ConfigDict) -> bool:
    return super().evaluates(config) or config.eval.prompts != 'none' or config.eval.retrieval > 0

  def check_source(self, config: ConfigDict, network: nn.Module, source: sources.Source) -> None:
    encoder = network.text.encoder
    _check_vocabulary('method.text', encoder, config, source.vocabulary)
    fits = lambda tokens: tokens <= encoder.positions
    require('data.tokens', config.data.tokens, fits, f'at most method.text.positions = {encoder.positions}')

  def identity(self, source: sources.Source) -> dict[str, Any]:
    return {'words': source.vocabulary.digest}

  def files(self, source: sources.Source) -> dict[str, str]:
    return source.vocabulary.files()


class _Sentences(Modality):
  name = encoded = 'sentences'
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
    'eval.flip': False,
    'eval.patches': 0,
    'eval.whiten': False,
    'eval.data.name': '',
    'eval.prompts': '',
  }
  encoder_hint = 'give bert_base, or another data.source'

  def input_size(self, config: ConfigDict) -> int:
    return config.data.tokens

  def views(self, config: ConfigDict, on_device: bool) -> views.Views:
    return views.Views([bert.view] * config.views, bert.without_dropout, None)

  def open(self, config: ConfigDict, split: str = 'train', data: Mapping[str, Any] | None = None) -> sources.Source:
    return sentences.load(config.data)

  def evaluates(self, config: ConfigDict) -> bool:
    return bool(config.eval.sts)

  def place(self, config: ConfigDict, source: sources.Source) -> tuple[sources.Source, bool]:
    return source, True  # token ids are small

  def check(self, config: ConfigDict, encoder: nn.Module) -> None:
    super().check(config, encoder)
    if config.method.name == IMAGE_TEXT:
      raise ValueError(
        f'method.name = {IMAGE_TEXT!r} needs images with captions, but data.source = {config.data.source!r} has '
        'sentences: give another data.source, or method.name=cmc'
      )
    if further := [key for key in flatten(config) if key.startswith('augment') and key != 'augment.name']:
      raise ValueError(f'{further[0]} does not apply to sentences: leave it out, or set model.dropout')
    if config.data.on_device == 'no':
      raise ValueError("data.on_device = 'no' does not apply to sentences: set data.on_device='auto'")
    for key, known in (('sts', 'sts12.tsv, stsb.tsv'), ('transfer', 'mr.tsv, trec.tsv')):
      if (folder := config.eval[key]) and not pathlib.Path(folder).expanduser().is_dir():
        raise ValueError(f'eval.{key} = {folder!r} is not a folder: give one with {known}, ...')

  def check_weights(self, config: ConfigDict) -> None:
    if not config.data.vocabulary:
      raise ValueError(f'init = {config.init!r} needs the vocabulary of its weights: set data.vocabulary=vocab.txt')

  def check_source(self, config: ConfigDict, network: nn.Module, source: sources.Source) -> None:
    assert isinstance(source, sentences.Sentences)
    _check_vocabulary('model', network.encoder, config, source.vocabulary)

  def identity(self, source: sources.Source) -> dict[str, Any]:
    assert isinstance(source, sentences.Sentences)
    return {'words': source.vocabulary.digest}

  def files(self, source: sources.Source) -> dict[str, str]:
    assert isinstance(source, sentences.Sentences)
    return source.vocabulary.files()


def _check_vocabulary(section: str, encoder: nn.Module, config: ConfigDict, words: sentences.Vocabulary) -> None:
  if encoder.vocabulary < len(words):
    pieces = f'{len(words):,} entries of {config.data.vocabulary or "the vocabulary of the sentences"}'
    raise ValueError(f'{section}.vocabulary = {encoder.vocabulary} must be at least the {pieces}')


IMAGES, SENTENCES, PAIRS = _Images(), _Sentences(), _Pairs()


def modality_of(config: ConfigDict) -> Modality:
  """The modality of a config: sentences for `data.source=text`, pairs for the method `image_text`, otherwise images."""
  if config.data.source == 'text':
    return SENTENCES
  return PAIRS if config.method.get('name') == IMAGE_TEXT else IMAGES
