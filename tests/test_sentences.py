"""Training on sentences, from the text file to the report: on any devices, interrupted or not, with any method."""

import html
import json

import chex
import jax
import numpy as np
import pytest

from configs import sentences
from ssl_jax import config, methods, train
from ssl_jax.data.modality import IMAGES, SENTENCES
from ssl_jax.evals import evaluate, sentence_transfer, sts
from ssl_jax.models import torch_weights
from ssl_jax.reporting import export, report, torch_code, views
from ssl_jax.run import builder
from tests.helpers import asked_to_stop_at, changed, final

pytestmark = pytest.mark.slow  # it trains a BERT

WORDS = ['a', 'the', 'dog', 'cat', 'man', 'woman', 'runs', 'sleeps', 'eats', 'red', 'blue', 'house', 'in', 'on', 'near']


def small(tmp_path, **changes):
  """64 sentences of seven words, a narrow BERT, 6 steps."""
  rng = np.random.default_rng(0)
  line = lambda: ' '.join(rng.choice(WORDS, 7)) + '.'
  if not (file := tmp_path / 'sentences.txt').exists():
    file.write_text('\n'.join(line() for _ in range(64)))
    (tmp_path / 'sts').mkdir()
    pairs = [f'test\t{rng.uniform(0, 5):.2f}\t{line()}\t{line()}\n' for _ in range(20)]
    (tmp_path / 'sts' / 'stsb.tsv').write_text(''.join(pairs))
    (tmp_path / 'sts' / 'sts12.tsv').write_text(''.join(pairs[:9]))
  chosen = sentences.get_config()
  settings = {
    'data.path': str(file),
    'data.tokens': 8,
    'model': dict(name='bert_tiny', width=16, depth=1, vocabulary=200, pooling='mean'),
    'dtype': 'float32',
    'batch_size': 16,
    'steps': 6,
    'optimizer.learning_rate': 0.01,
    'parallel.devices': 1,
    'eval': dict(sts=str(tmp_path / 'sts'), every_epochs=1, batch_size=16),
    'log': dict(every_steps=1, tensorboard=False),
  }
  return changed(chosen, settings | changes)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(folder of the data, workdir of a finished run, its config)"""
  folder = tmp_path_factory.mktemp('sentences')
  chosen = small(folder, **{'eval.at_start': True, 'eval.at_end': True})
  train.train(chosen, str(folder / 'run'))
  return folder, folder / 'run', chosen


def test_rows_and_summary_have_the_correlations(trained):
  _, workdir, _ = trained
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  names = {'spearman_stsb', 'spearman_sts12', 'spearman_mean'}
  evaluated = [row for row in rows if names <= row.keys()]
  assert [row['step'] for row in evaluated] == [0, 4, 6]
  assert all(row['spearman_mean'] == np.mean([row['spearman_stsb'], row['spearman_sts12']]) for row in evaluated)
  assert all('sentences_per_second' in row for row in rows if 'loss' in row)
  losses = [row['loss'] for row in rows if 'loss' in row]
  assert losses[-1] < losses[0]
  assert json.loads((workdir / 'summary.json').read_text())['spearman_stsb'] == evaluated[-1]['spearman_stsb']


def test_the_evaluation_equals_slow_loops(trained, tmp_path):
  folder, workdir, chosen = trained
  prepared = builder.build(chosen)
  evaluator = evaluate.evaluator_of(prepared)
  state = final(workdir, chosen)[1]
  pairs = sts.read(str(folder / 'sts'))['stsb']

  def features(line):
    tokens = prepared.train.vocabulary.encode([line], 16)[0]
    return np.asarray(prepared.method.features(*state.evaluated, prepared.views.eval_view(tokens)[None])['backbone'][0])

  cosine = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)
  cosines = [cosine(features(a), features(b)) for a, b in zip(pairs.first, pairs.second, strict=True)]
  found = json.loads((workdir / 'evaluation.json').read_text())
  np.testing.assert_allclose(found['spearman_stsb'], sts.spearman(np.array(cosines), pairs.score), atol=1e-6)
  alike = [1 - c for c, score in zip(cosines, pairs.score, strict=True) if score >= sts.PARAPHRASE]
  np.testing.assert_allclose(found['measures']['backbone']['alignment'], 2 * np.mean(alike), rtol=1e-4)
  evaluator.evaluate(state, tmp_path)
  near = evaluator.neighbors()
  again = evaluator.scores(prepared.devices.replicate(state))
  assert again == {name: found[name] for name in again}
  assert near == evaluator.neighbors()


@pytest.mark.slow
def test_labeled_sentences_are_classified(trained, tmp_path):
  folder, workdir, _ = trained
  rng = np.random.default_rng(1)
  line = lambda *words: ' '.join([*words, *rng.choice(WORDS, 4)])
  single = [('all', k, line(('dog', 'cat')[k])) for k in range(2) for _ in range(12)]
  colors = ('red', 'blue')
  same = [(('train', 'test')[n % 4 == 0], k, line('red'), line(colors[k])) for n in range(12) for k in range(2)]
  for name, rows in dict(mr=single, mrpc=same).items():
    (tmp_path / f'{name}.tsv').write_text('\n'.join('\t'.join(map(str, row)) for row in rows))
  chosen = small(folder, **{'eval.transfer': str(tmp_path)})
  found = evaluate.evaluate(chosen, str(workdir))
  assert found['transfer_mean'] == np.mean([found['transfer_mr'], found['transfer_mrpc']])
  assert found['spearman_stsb'] == json.loads((workdir / 'summary.json').read_text())['spearman_stsb']
  prepared = builder.build(chosen)
  state = final(workdir, chosen)[1]

  def features(line):
    tokens = prepared.train.vocabulary.encode([line], 16)[0]
    return np.asarray(prepared.method.features(*state.evaluated, prepared.views.eval_view(tokens)[None])['backbone'][0])

  u, v = (np.stack([features(row[column]) for row in same]) for column in (2, 3))
  inputs = sentence_transfer.features(u, v)
  split, label = (np.array([row[column] for row in same]) for column in (0, 1))
  assert found['transfer_mrpc'] == pytest.approx(sentence_transfer.accuracy(inputs, label, split))


@pytest.mark.slow
def test_two_devices_give_the_same_run(trained, tmp_path):
  """The dropout of a sentence does not depend on its device."""
  folder, workdir, chosen = trained
  other = small(folder, **{'parallel.devices': 2, 'eval.sts': ''})
  train.train(other, str(tmp_path / 'two'))
  (one, state), (two, again) = final(workdir, chosen), final(tmp_path / 'two', other)
  np.testing.assert_allclose(two, one, rtol=1e-4)
  chex.assert_trees_all_close(again.params, state.params, atol=1e-3)  # Adam divides by small numbers


@pytest.mark.slow
def test_an_interrupted_run_is_the_same_run(trained, tmp_path):
  folder, workdir, chosen = trained
  with asked_to_stop_at(3), pytest.raises(train.Interrupted, match='stopped at step 3 of 6'):
    train.train(small(folder), str(tmp_path / 'again'))
  train.train(small(folder), str(tmp_path / 'again'))
  (one, state), (two, again) = final(workdir, chosen), final(tmp_path / 'again', chosen)
  assert one == two
  chex.assert_trees_all_equal(again.params, state.params)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['simclr', 'moco'])
def test_other_methods_train_on_sentences(trained, tmp_path, method):
  temperature = dict(name='shifted_cosine', tau_min=0.03, tau_max=0.05, shift=-0.4, scale=0.7)
  changes = {
    'simclr': {'method': dict(name='simclr'), 'temperature': temperature},
    'moco': {'method': dict(name='moco', queue=32)},
  }[method]
  chosen = small(trained[0], **changes, **{'eval.sts': '', 'optimizer.learning_rate': 0.003})
  train.train(chosen, str(tmp_path / method))
  losses = final(tmp_path / method, chosen)[0]
  assert len(losses) == 6 and np.isfinite(losses).all()


@pytest.mark.slow
def test_the_exported_encoder_gives_the_same_features_and_starts_another_run(trained, tmp_path):
  folder, workdir, chosen = trained
  out = export.export(chosen, str(workdir))
  assert {file.name for file in out.iterdir()} == {
    *('model.safetensors', 'encoder.jax', 'projector.safetensors', 'README.md', 'config.json', 'vocab.txt')
  }
  prepared = builder.build(chosen)
  assert (out / 'vocab.txt').read_text().split() == list(prepared.train.vocabulary.pieces)
  tokens = prepared.train.items[:3]
  program = jax.export.deserialize(bytearray((out / 'encoder.jax').read_bytes()))
  state = final(workdir, chosen)[1]
  expected = prepared.method.features(*state.evaluated, jax.vmap(prepared.views.eval_view)(tokens))['backbone']
  np.testing.assert_allclose(program.call(tokens), expected, atol=1e-5)
  started = {'init': str(out / 'model.safetensors'), 'data.vocabulary': str(out / 'vocab.txt')}
  other = builder.build(small(folder, **started))
  chex.assert_trees_all_equal(other.initial_state().params['network']['encoder'], state.params['network']['encoder'])
  results = evaluate.evaluate(small(folder, **started), str(tmp_path / 'evaluated'))
  assert results['step'] == 0
  found = json.loads((workdir / 'evaluation.json').read_text())
  assert results['spearman_mean'] == pytest.approx(found['spearman_mean'], abs=1e-6)


def test_an_exported_clip_text_encoder_names_torch_code_that_computes_its_features(trained, tmp_path):
  torch = pytest.importorskip('torch')
  from safetensors.torch import load_file

  sizes = dict(name='clip_text_tiny', width=16, depth=1, heads=2, vocabulary=400, positions=32)
  chosen = small(trained[0], model=sizes, steps=1)
  train.train(chosen, str(tmp_path))
  out = export.export(chosen, str(tmp_path))
  code = torch_code.source(builder.build(chosen).method.network.encoder, chosen.data.tokens)
  text = (out / 'README.md').read_text()
  assert code in text and "features = encoder(inputs['input_ids'])" in text
  scope: dict = {}
  exec(code, scope)
  scope['encoder'].load_state_dict(load_file(out / 'model.safetensors'))
  tokens = builder.build(chosen).train.items[:3]
  with torch.no_grad():
    features = scope['encoder'].eval()(torch.tensor(tokens.astype(np.int64)))
  program = jax.export.deserialize(bytearray((out / 'encoder.jax').read_bytes()))
  np.testing.assert_allclose(program.call(tokens), features, atol=1e-5)


def test_the_report_shows_the_correlations(trained):
  _, workdir, _ = trained
  text = report.report(workdir).read_text()
  assert 'Spearman, stsb, × 100' in text and 'train sentences' in text
  first = (workdir / 'neighbors.txt').read_text().splitlines()[0]
  assert f'<pre>{html.escape(first)}\n' in text


def test_the_nearest_sentences_are_written(trained):
  folder, workdir, _ = trained
  lines = (workdir / 'neighbors.txt').read_text().splitlines()
  known = set((folder / 'sts' / 'stsb.tsv').read_text().replace('\n', '\t').split('\t'))
  assert len(lines) == 10 * 5 - 1
  for start in range(0, len(lines), 5):
    query, *others = lines[start : start + 4]
    cosines, found = zip(*(line.strip().split('  ') for line in others), strict=True)
    assert {query, *found} <= known and query not in found
    assert list(map(float, cosines)) == sorted(map(float, cosines), reverse=True)


def test_views_of_sentences_are_not_drawn(trained, tmp_path):
  with pytest.raises(ValueError, match=r"^data\.source = 'text' has no images: give --mode=views a config of images$"):
    views.draw_views(trained[2], str(tmp_path))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'model': dict(name='resnet_tiny')},
      r"model\.name = 'resnet_tiny' encodes images, but data\.source = 'text' has sentences: give bert",
    ),
    (
      {'augment': dict(name='simclr')},
      r"augment\.name = 'simclr' does not apply to sentences: set augment\.name='drop",
    ),
    ({'eval.k': (5,)}, r'eval\.k = \[5\] does not apply to sentences: set eval\.k=\[\]'),
    ({'online_probe': 0.1}, r'online_probe = 0\.1 does not apply to sentences: set online_probe=0\.0'),
    (
      {'model.vocabulary': 20},
      r'model\.vocabulary = 20 must be at least the \d+ entries of the vocabulary of the sentences',
    ),
    ({'data.path': 'nowhere.txt'}, r"data\.path = 'nowhere\.txt' is not a file"),
    ({'data.vocabulary': 'nowhere.txt'}, r"data\.vocabulary = 'nowhere\.txt' is not a file"),
    ({'init': 'x.safetensors'}, r"init = 'x\.safetensors' needs the vocabulary of its weights"),
    ({'augment.rate': 0.3}, r'augment\.rate does not apply to sentences: leave it out, or set model\.dropout'),
    ({'augment_other': dict(flip=0.5)}, r'augment_other\.flip does not apply to sentences'),
    ({'data.on_device': 'no'}, r"data\.on_device = 'no' does not apply to sentences"),
    ({'eval.sts': 'nowhere'}, r"eval\.sts = 'nowhere' is not a folder"),
    ({'eval.transfer': 'nowhere'}, r"eval\.transfer = 'nowhere' is not a folder"),
    ({'batch_size': 512}, r'batch_size = 512 must not exceed the 64 training sentences'),
  ],
)
def test_invalid_configs_are_refused_before_training(trained, changes, message):
  with pytest.raises(ValueError, match='^' + message):
    builder.build(small(trained[0], **changes))


def test_evaluating_sentences_needs_scored_pairs(trained, tmp_path):
  with pytest.raises(ValueError, match=r"^eval\.sts = '' names no scored pairs"):
    evaluate.evaluate(small(trained[0], init='random', **{'eval.sts': ''}), str(tmp_path))


def test_keys_of_sentences_are_refused_for_images():
  chosen = config.load('configs/cifar10.py', ['eval.sts=sts'])
  with pytest.raises(ValueError, match=r"^eval\.sts = 'sts' does not apply to images: set eval\.sts=''"):
    IMAGES.check(chosen, methods.parts(chosen, None).network.encoder)


def test_a_sentence_encoder_is_refused_for_images():
  chosen = config.load('configs/cifar10.py', ['model.name=bert_tiny'])
  with pytest.raises(
    ValueError, match=r"^model\.name = 'bert_tiny' encodes sentences, but data\.source = 'tfds' has images"
  ):
    IMAGES.check(chosen, methods.parts(chosen, None).network.encoder)


def test_another_vocabulary_is_refused(trained, tmp_path):
  """Another text with as many sentences would number the words differently."""
  folder, workdir, _ = trained
  lines = (folder / 'sentences.txt').read_text().split('\n')
  (tmp_path / 'other.txt').write_text('\n'.join(line.replace('dog', 'zebra') for line in lines))
  other = small(folder, **{'data.path': str(tmp_path / 'other.txt')})
  kept = (workdir / 'vocab.txt').read_text()
  for run in (train.train, evaluate.evaluate):
    with pytest.raises(ValueError, match=r'holds a run of another config \(data\.words = '):
      run(other, str(workdir))
  assert (workdir / 'vocab.txt').read_text() == kept


def test_long_sentences_are_not_cut(trained, tmp_path):
  """Two sentences that differ only after the last token of training have different features."""
  folder, _, _ = trained
  start = ' '.join(WORDS)
  pairs = [(5, 'a dog', 'a dog'), (3, f'{start} dog', f'{start} cat'), (1, 'a red house', 'the blue cat')]
  (tmp_path / 'long.tsv').write_text(''.join(f'test\t{score}\t{a}\t{b}\n' for score, a, b in pairs))
  prepared = builder.build(small(folder, **{'eval.sts': str(tmp_path)}))
  evaluator = evaluate.evaluator_of(prepared)
  found = evaluator.scores(prepared.devices.replicate(prepared.initial_state()))
  assert found.keys() == {'spearman_long', 'spearman_mean'}
  places = [evaluator._position[f'{start} {word}'] for word in ('dog', 'cat')]
  assert np.abs(np.subtract(*evaluator.latest[places])).max() > 1e-4
  np.testing.assert_allclose(np.linalg.norm(evaluator.latest, axis=1), 1, rtol=1e-5)


def test_every_variant_builds_a_network():
  for variant in sentences.VARIANTS:
    chosen = config.load(f'configs/sentences.py:{variant}', ['model.depth=1'])
    encoder = methods.parts(chosen, None).network.encoder
    SENTENCES.check(chosen, encoder)
    assert len(SENTENCES.views(chosen, on_device=True).training) == 2


def test_weights_of_image_encoders_are_refused(trained, tmp_path):
  import safetensors.numpy

  safetensors.numpy.save_file({'conv1.weight': np.ones((1, 1), np.float32)}, tmp_path / 'resnet.safetensors')
  encoder = builder.build(trained[2]).method.network.encoder
  with pytest.raises(ValueError, match=r"has 'conv1\.weight', which the encoder does not have"):
    torch_weights.load(tmp_path / 'resnet.safetensors', encoder, 8)
