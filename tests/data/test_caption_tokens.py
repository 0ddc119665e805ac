"""Captions: what they say about the embedded images, how they become tokens, and which of them a step sees."""

import collections
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssl_jax.data import captions, embedded, embedded_captions, pipeline, sentences, sources

DATA = dict(source='embedded', broken='error', classes='', train_split='train', test_split='test', vocabulary='')


@pytest.fixture(scope='module')
def scenes():
  return embedded.scenes('test')


@pytest.fixture(scope='module')
def source(scenes):
  found = sources.Arrays(scenes.images[:40], scenes.labels[:40], embedded.CLASSES)
  texts = embedded_captions.captions(scenes)[:40]
  found.captions = [text[: 1 + k % 3] for k, text in enumerate(texts)]  # from one to three of each
  found.paired = True
  return found


def test_no_images_have_no_tokens(source):
  vocabulary = captions.vocabulary_of(DATA, source)
  tokens, number = captions.tokens_of(source.subset(np.arange(0)), vocabulary, 8)
  assert tokens.shape == (0, 1, 8) and number.shape == (0,)


def test_every_sentence_names_the_shape_of_its_image(scenes):
  for label, texts in zip(scenes.labels, embedded_captions.captions(scenes), strict=True):
    shape = embedded.CLASSES[label]
    names = {shape, embedded_captions.SYNONYMS[shape]}
    others = {*embedded.CLASSES} - {shape}
    assert len({*texts}) == len(embedded_captions.PHRASES)
    for text in texts:
      assert any(name in text for name in names), text
      assert not others & {*text.replace(',', '').split()}, text


def test_colors_and_places_say_nothing_about_the_shape(scenes):
  """Otherwise zero-shot classification could do without the shape."""
  for names in (embedded_captions.color_names(scenes.color), embedded_captions.place_names(scenes.place)):
    for name, total in collections.Counter(names).most_common(6):
      shapes = collections.Counter(label for label, found in zip(scenes.labels, names, strict=True) if found == name)
      assert max(shapes.values()) < 0.25 * total, name


def test_the_sentences_are_true(scenes):
  """The pixels at the edges have the color of the background, and the light is where the place says."""
  edge = np.concatenate([scenes.images[:, 0], scenes.images[:, -1]], axis=1) / 255
  assert np.abs(np.median(edge, axis=1) - scenes.background).mean() < 0.05
  different = np.abs(scenes.images / 255 - scenes.background[:, None, None]).sum(axis=3) > 0.3
  columns = (different.sum(axis=1) * np.arange(32)).sum(axis=1) / np.maximum(different.sum(axis=(1, 2)), 1) - 15.5
  assert np.corrcoef(columns, scenes.place[:, 0])[0, 1] > 0.6


def test_names_of_colors_and_places():
  colors = [[0.9, 0.1, 0.1], [0.9, 0.9, 0.1], [0.1, 0.5, 0.1], [0.1, 0.9, 0.9], [0.1, 0.1, 0.9], [0.5, 0, 0.5]]
  names = ['dark red', 'light yellow', 'dark green', 'light turquoise', 'dark blue', 'dark purple']
  assert embedded_captions.color_names(np.float32(colors)) == names
  assert embedded_captions.color_names(np.float32([[0.2, 0.25, 0.2], [0, 0, 0]])) == ['dark gray', 'dark gray']
  places = [[5, -5], [5, 0], [0, 0], [-5, 5]]
  expected = ['at the top right', 'at the right', 'in the middle', 'at the bottom left']
  assert embedded_captions.place_names(np.float32(places)) == expected


def test_the_embedded_source_keeps_its_captions(monkeypatch):
  monkeypatch.setattr(embedded, 'SIZES', {'train': 16, 'test': 8})
  found = sources.load(DATA, 'train')
  texts = found.captions_of(np.arange(16))
  assert texts is not None and texts[3][0] == 'the picture shows a square'
  assert found.subset(np.array([3, 5])).captions_of(np.array([0])) == [texts[3]]
  assert found.in_memory(32).captions_of(np.arange(2)) is None  # nobody has asked for them
  found.paired = True
  assert found.in_memory(32).captions_of(np.array([3])) == [texts[3]]
  assert found.in_memory(16).captions_of(np.array([3])) == [texts[3]]
  assert sources.Source(np.arange(3)).captions_of(np.arange(3)) is None


def test_tokens_of_all_captions(source):
  vocabulary = captions.vocabulary_of(DATA, source)
  found = captions.tokens_of(source, vocabulary, 16)
  assert found.tokens.shape == (40, 3, 16) and found.tokens.dtype == np.uint16
  for k, texts in enumerate(source.captions):
    assert found.number[k] == len(texts)
    np.testing.assert_array_equal(found.tokens[k, : len(texts)], vocabulary.encode(texts, 16))
    assert not found.tokens[k, len(texts) :].any()


def test_a_view_draws_each_caption_equally_often(source):
  vocabulary = captions.vocabulary_of(DATA, source)
  tokens = captions.tokens_of(source, vocabulary, 16)
  example = {'tokens': jnp.asarray(tokens.tokens[2]), 'number': jnp.asarray(tokens.number[2])}
  keys = jax.random.split(jax.random.key(0), 600)
  views = np.asarray(jax.jit(jax.vmap(lambda key: captions.view(key, example)))(keys))
  counts = collections.Counter(tuple(view[:16]) for view in views)
  assert {*counts} == {tuple(row) for row in tokens.tokens[2]}
  assert min(counts.values()) > 150
  assert len({tuple(view[16:]) for view in views}) == 600  # dropout differs


def test_the_host_draws_by_seed_step_and_slot(source):
  """Any number of workers and processes gives the same captions, each of the image that was read."""
  reader = captions.Reader(captions.vocabulary_of(DATA, source), 16)
  reader = pickle.loads(pickle.dumps(reader))  # as for a worker
  settings = dict(seed=3, batch_size=8, total_steps=10, crops=[pipeline.Crop(16)], captions=reader)
  whole = list(pipeline.batches(source, **settings))
  halves = [list(pipeline.batches(source, **settings, process_index=k, process_count=2)) for k in range(2)]
  resumed = list(pipeline.batches(source, **settings, start_step=6))
  seen = collections.defaultdict(set)
  for step, batch in enumerate(whole):
    tokens = batch['images'][-1]
    assert tokens.shape == (8, 1, 16)
    np.testing.assert_array_equal(tokens, np.concatenate([half[step]['images'][-1] for half in halves]))
    for k, row in zip(batch['index'], tokens[:, 0], strict=True):
      own = reader.vocabulary.encode(source.captions[k], 16)
      assert row.tolist() in own.tolist()
      seen[int(k)].add(row.tobytes())
  for batch, again in zip(whole[6:], resumed, strict=True):
    np.testing.assert_array_equal(batch['images'][-1], again['images'][-1])
  assert {len(texts) for texts in seen.values()} > {1}, 'other epochs draw other captions'


def test_a_vocabulary_file_is_used(tmp_path, source):
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'star']
  (tmp_path / 'vocab.txt').write_text('\n'.join(words))
  found = captions.vocabulary_of({**DATA, 'vocabulary': str(tmp_path / 'vocab.txt')}, source)
  assert isinstance(found, sentences.Vocabulary) and list(found.pieces) == words
