"""Image and text together: published formulas, any devices, interrupted or not, on the device or from the host."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from configs import captions
from ssl_jax import config, losses, methods, pairs, train
from ssl_jax.data import embedded
from ssl_jax.data.modality import PAIRS
from ssl_jax.evals import evaluate, transfer
from ssl_jax.models import bert
from ssl_jax.reporting import export, report, views
from ssl_jax.run import builder
from tests.helpers import asked_to_stop_at, changed, final, mapped

B, D = 8, 5


def embeddings():
  return np.random.default_rng(0).normal(size=(2, B, D)).astype(np.float32)


# The published formulas, in torch.


def clip(images, texts, scale):
  """open_clip's ClipLoss: logits in both directions, cross-entropy with the diagonal, the mean of both."""
  images, texts = (torch.nn.functional.normalize(x, dim=-1) for x in (images, texts))
  logits, labels = scale.exp() * images @ texts.T, torch.arange(B)
  entropy = torch.nn.functional.cross_entropy
  return (entropy(logits, labels) + entropy(logits.T, labels)) / 2


def siglip(images, texts, scale, bias):
  """Algorithm 1 of SigLIP: every pair is positive or negative, the sum over pairs divided by the batch size."""
  images, texts = (torch.nn.functional.normalize(x, dim=-1) for x in (images, texts))
  logits = scale.exp() * images @ texts.T + bias
  signs = 2 * torch.eye(B, dtype=logits.dtype) - 1
  return -torch.nn.functional.logsigmoid(signs * logits).sum() / B


def ours(params, batch, loss, axis_name=None, block=0):
  """(the mean loss of this device's pairs, gradients), averaged over the devices."""

  def mean(params):
    images, texts = (batch[:, k] @ params['weights'][k] for k in range(2))
    contrast, tau = losses.Loss(losses.CONTRASTIVE[loss]).at(params), jnp.exp(-params['scale'])
    make = functools.partial(pairs.with_keys, axis_name=axis_name, block=block)
    of_pairs = lambda pair: jnp.mean(contrast(pair.pos, pair.neg, tau, where=pair.where, axis_name=axis_name))
    return (of_pairs(make(images, texts)) + of_pairs(make(texts, images))) / 2

  value, gradients = jax.value_and_grad(mean)(params)
  return (value, gradients) if axis_name is None else jax.lax.pmean((value, gradients), axis_name)


@pytest.mark.parametrize('loss', ['info_nce', 'sigmoid'])
@pytest.mark.parametrize(('devices', 'how', 'block'), [(1, '', 0), (1, '', 3), (4, 'pmap', 0), (2, 'shard_map', 3)])
def test_the_loss_is_the_published_one_in_value_and_gradient(loss, devices, how, block):
  weights = np.random.default_rng(1).normal(size=(2, D, 3)).astype(np.float32)
  params = {'weights': weights, 'scale': np.float32(np.log(10.0))}
  if loss == 'sigmoid':
    params['loss'] = {'bias': np.float32(-3.0)}
  batch = embeddings().swapaxes(0, 1)
  of = functools.partial(ours, loss=loss, block=block)
  if devices == 1:
    value, gradients = jax.jit(of)(params, batch)
  else:
    found = mapped(functools.partial(of, axis_name='batch'), devices, how)(params, batch)
    value, gradients = jax.tree.map(lambda x: x[-1], found)

  given = jax.tree.map(lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True), params)
  images, texts = (torch.tensor(batch[:, k]).double() @ given['weights'][k] for k in range(2))
  expected = (
    siglip(images, texts, given['scale'], given['loss']['bias'])
    if loss == 'sigmoid'
    else clip(images, texts, given['scale'])
  )
  expected.backward()
  np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
  for actual, tensor in zip(jax.tree.leaves(gradients), jax.tree.leaves(given), strict=True):
    np.testing.assert_allclose(actual, tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


# Training.

SIZES = {'train': 64, 'test': 32}


@pytest.fixture(autouse=True, scope='module')
def few_images():
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(embedded, 'SIZES', SIZES)
    yield


def small(variant='clip', **changes):
  """64 pairs, narrow encoders, 6 steps."""
  chosen = captions.get_config(variant)
  text = dict(name='clip_text_tiny', width=16, depth=1, heads=2, vocabulary=200, positions=24)
  settings = {
    'data.tokens': 16,
    'model': dict(name='resnet_tiny', width=8, stage_sizes=(1,)),
    'projector': dict(name='clip', features=(8,)),
    'method.text': text,
    'batch_size': 16,
    'steps': 6,
    'optimizer.learning_rate': 0.003,
    'optimizer.warmup_epochs': 0.0,
    'parallel': dict(devices=1, cpu_devices=1),
    'eval': dict(every_epochs=1, batch_size=16, at_start=False),
    'log': dict(every_steps=1, tensorboard=False),
  }
  return changed(chosen, settings | changes)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(workdir of a finished run with everything evaluated, its config)"""
  folder = tmp_path_factory.mktemp('pairs')
  chosen = small('siglip', **{'eval.at_start': True, 'eval.at_end': True, 'eval.k': (5,), 'eval.linear': 'ridge'})
  train.train(chosen, str(folder / 'run'))
  return folder / 'run', chosen


@pytest.mark.slow
def test_rows_have_the_numbers_and_the_bias_is_learned(trained):
  workdir, chosen = trained
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  evaluated = [row for row in rows if 'zero_shot' in row]
  assert [row['step'] for row in evaluated] == [0, 4, 6]
  names = {f'{a}_{k}' for a in ('image_to_text', 'text_to_image') for k in (1, 5, 10)}
  assert all(names <= row.keys() and 'knn5' in row for row in evaluated)
  steps = [row for row in rows if 'loss' in row]
  assert all('pairs_per_second' in row for row in steps)
  assert steps[0]['loss_bias'] == -10 and steps[-1]['loss_bias'] != -10
  assert steps[-1]['loss'] < steps[0]['loss']
  state = final(workdir, chosen)[1]
  assert state.params['loss']['bias'] != -10
  assert state.params['network'].keys() == {'encoder', 'projector', 'text'}
  assert (workdir / 'vocab.txt').read_text().startswith('[PAD]')


@pytest.mark.slow
def test_the_evaluation_equals_slow_loops(trained):
  workdir, chosen = trained
  run = builder.build(chosen)
  params, stats = final(workdir, chosen)[1].evaluated
  test, found = run.eval_test, json.loads((workdir / 'evaluation.json').read_text())
  unit = lambda x: x / np.linalg.norm(x)

  def read(line):
    tokens = run.train.vocabulary.encode([line], 16).astype(np.uint32)
    inputs = np.concatenate([tokens, np.zeros((1, 2), np.uint32)], axis=1)
    return np.asarray(run.method.text_features(params, stats, inputs)['projector'][0], np.float64)

  images = [
    np.asarray(run.method.features(params, stats, run.views.eval_view(image)[None])['projector'][0], np.float64)
    for image in test.items
  ]
  weights = [
    unit(np.mean([unit(read(template.format(name))) for template in found['prompts']], axis=0))
    for name in embedded.CLASSES
  ]
  predicted = [np.argmax([unit(x) @ w for w in weights]) for x in images]
  assert found['zero_shot'] == pytest.approx(100 * np.mean(np.array(predicted) == test.labels))
  own = test.captions_of(np.arange(len(test)))
  texts = {line: read(line) for line in {line for lines in own for line in lines}}
  hits = []
  for x, lines in zip(images, own, strict=True):
    order = sorted(texts, key=lambda line, x=x: -(unit(x) @ unit(texts[line])))
    hits.append(bool({*order[:5]} & {*lines}))
  assert found['image_to_text_5'] == pytest.approx(100 * np.mean(hits), abs=100 / len(test))
  first = [texts[lines[0]] for lines in own]
  gap = np.linalg.norm(np.mean([unit(x) for x in images], axis=0) - np.mean([unit(y) for y in first], axis=0))
  assert found['measures']['pairs']['modality_gap'] == pytest.approx(gap, rel=1e-3)
  assert {'backbone', 'projector', 'text_backbone', 'text_projector', 'pairs'} == found['measures'].keys()
  assert 'alignment' in found['measures']['text_projector'] and 'uniformity' in found['measures']['text_backbone']
  batch = found['measure_settings']['batch_size']
  for layer in ('projector', 'text_projector', 'text_backbone'):  # the entropy of a choice among batch - 1 negatives
    assert 0 < found['measures'][layer]['conditional_entropy'] <= np.log(batch - 1) + 1e-6
  assert len(found['classes']['zero_shot']) == len(embedded.CLASSES)
  assert 0 <= found['linear'] <= 100


@pytest.mark.slow
def test_the_report_shows_zero_shot_retrieval_and_the_gap(trained):
  workdir, _ = trained
  text = report.report(workdir).read_text()
  assert all(words in text for words in ('zero-shot, %', 'image to text, R@5, %', 'modality gap', 'text_projector'))
  lines = (workdir / 'neighbors.txt').read_text().splitlines()
  assert lines[0].startswith('image of "') and len(lines) == 10 * 5 - 1


@pytest.mark.slow
def test_the_exported_programs_give_the_same_embeddings(trained):
  workdir, chosen = trained
  out = export.export(chosen, str(workdir))
  names = {'image_embedding.jax', 'text_embedding.jax', 'text_encoder.safetensors', 'text_projector.safetensors'}
  assert names | {'model.safetensors', 'vocab.txt', 'README.md'} <= {file.name for file in out.iterdir()}
  run, (params, stats) = builder.build(chosen), final(workdir, chosen)[1].evaluated
  unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
  load = lambda name: jax.export.deserialize(bytearray((out / name).read_bytes()))
  images, tokens = run.train.items[:3], run.train.tokens.tokens[:3, 0]
  seen = run.method.features(params, stats, jax.vmap(run.views.eval_view)(images))['projector']
  np.testing.assert_allclose(load('image_embedding.jax').call(images), unit(seen), atol=1e-5)
  read = run.method.text_features(params, stats, jax.vmap(bert.without_dropout)(tokens))['projector']
  np.testing.assert_allclose(load('text_embedding.jax').call(tokens), unit(read), atol=1e-5)
  assert 'text_embedding.jax' in (out / 'README.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('variant', 'more'), [('siglip', {}), ('cacr', {}), ('dystress', {}), ('clip', {'method.queue': 32})]
)
def test_two_and_four_devices_give_the_same_run(tmp_path, variant, more):
  results = {}
  for devices, kind in ((1, 'pmap'), (2, 'shard_map'), (4, 'pmap')):
    quiet = {'eval.prompts': 'none', 'eval.retrieval': 0}
    # Not Adam: it divides by small numbers, and the gradient of the bias of an attention's keys is 0 but for rounding.
    sgd = {'optimizer.name': 'sgd', 'optimizer.learning_rate': 0.05}
    chosen = small(variant, steps=4, **{'parallel.devices': devices, 'parallel.map': kind, **quiet, **sgd, **more})
    train.train(chosen, str(tmp_path / str(devices)))
    results[devices] = final(tmp_path / str(devices), chosen)
  for devices in (2, 4):
    np.testing.assert_allclose(results[devices][0], results[1][0], rtol=1e-4)
    chex.assert_trees_all_close(results[devices][1].params, results[1][1].params, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('placed', ['yes', 'no'])
def test_an_interrupted_run_is_the_same_run(tmp_path, placed):
  changes = {'data.on_device': placed, 'eval.prompts': 'none', 'eval.retrieval': 0, 'steps': 5}
  chosen = small(**changes)
  train.train(chosen, str(tmp_path / 'whole'))
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(chosen, str(tmp_path / 'parts'))
  train.train(small(**changes, **{'data.workers': 1 if placed == 'no' else 0}), str(tmp_path / 'parts'))
  (one, state), (two, again) = final(tmp_path / 'whole', chosen), final(tmp_path / 'parts', chosen)
  assert one == two and len(one) == 5
  chex.assert_trees_all_equal(again.params, state.params)


@pytest.mark.slow
def test_several_image_views_blocks_and_bert(tmp_path):
  """Four views of an image are the positives of its caption; blocks give the same numbers in less memory."""
  quiet = {'eval.prompts': 'none', 'eval.retrieval': 0, 'steps': 3, 'views': 4}
  text = dict(name='bert_tiny', width=16, depth=1, vocabulary=200, positions=24, dropout=0.0)
  whole, blocks = (small('cacr', **quiet, **{'method.text': text, 'method.block': n}) for n in (0, 5))
  for chosen, name in ((whole, 'whole'), (blocks, 'blocks')):
    train.train(chosen, str(tmp_path / name))
  np.testing.assert_allclose(final(tmp_path / 'blocks', blocks)[0], final(tmp_path / 'whole', whole)[0], rtol=1e-4)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'method.text': dict(name='resnet_tiny')}, r"method\.text\.name = 'resnet_tiny' encodes images: give clip_text"),
    ({'method.text': dict(name='clip_txt')}, r"method\.text\.name = 'clip_txt' is not a known text: did you mean"),
    ({'method.text.vocabulary': 20}, r'method\.text\.vocabulary = 20 must be at least the \d+ entries'),
    ({'method.text.positions': 8}, r'data\.tokens = 16 must be at most method\.text\.positions = 8'),
    (
      {'method.text_projector': dict(name='clip', features=(4,))},
      r'method\.text_projector gives 4 features, but projector gives 8',
    ),
    ({'model': dict(name='bert_tiny')}, r"model\.name = 'bert_tiny' encodes sentences, but data\.source = 'embedded'"),
    ({'small_crops.number': 2}, r'small_crops\.number = 2 .*'),
    ({'eval.sts': 'sts'}, r"eval\.sts = 'sts' does not apply to pairs"),
    ({'method.block': -1}, r'method\.block = -1 must be'),
    ({'method.queue': 60}, r'method\.queue = 60 must be a multiple of batch_size = 16: try 48'),
    ({'loss': dict(name='sigmoid', bias=float('nan'))}, r'loss\.bias = nan must be'),
  ],
)
def test_invalid_configs_are_refused_before_training(changes, message):
  with pytest.raises(ValueError, match='^' + message) as error:
    builder.build(small(**changes))
  assert '\n' not in str(error.value)


def test_images_without_captions_are_refused(tmp_path):
  rng = np.random.default_rng(0)
  np.savez(tmp_path / 'images.npz', train_images=rng.integers(0, 256, (32, 32, 32, 3), np.uint8))
  changes = {'data.source': 'arrays', 'data.path': str(tmp_path / 'images.npz')}
  with pytest.raises(ValueError, match=r"^method\.name = 'image_text' needs captions, and data\.source = 'arrays' has"):
    builder.build(small(**changes))


def test_sentences_without_images_are_refused(tmp_path):
  chosen = config.load('configs/sentences.py:small', ['method.name=image_text'])
  with pytest.raises(ValueError, match=r"^method\.name = 'image_text' needs images with captions, but data\.source = "):
    builder.modality_of(chosen).check(chosen, methods.parts(chosen, None).network.encoder)


@pytest.mark.slow
def test_the_views_of_the_images_are_drawn(tmp_path):
  assert views.draw_views(small(), str(tmp_path), images=2, draws=1).exists()


def test_prompts_have_no_meaning_for_images():
  chosen = config.load('configs/cifar10.py', ['eval.prompts=plain'])
  with pytest.raises(ValueError, match=r"^eval\.prompts = 'plain' does not apply to images"):
    builder.modality_of(chosen).check(chosen, methods.parts(chosen, None).network.encoder)


@pytest.mark.parametrize('variant', captions.VARIANTS)
def test_every_variant_builds(variant):
  chosen = captions.get_config(variant)
  assert builder.modality_of(chosen) is PAIRS
  parts = methods.parts(chosen, None)
  PAIRS.check(chosen, parts.network.encoder)
  assert parts.network.text.encoder.modality == 'sentences'
  assert len(PAIRS.views(chosen, on_device=True).training) == 2


@pytest.mark.slow
def test_zero_shot_needs_no_captions_of_the_test_images(trained, tmp_path):
  """As for a run on pairs that is evaluated on ImageNet."""
  workdir, _ = trained
  images, labels = embedded.generate('test', seed=1)
  np.savez(tmp_path / 'shapes.npz', test_images=images, test_labels=labels, class_names=list(embedded.CLASSES))
  changes = {'eval.data': dict(name='shapes', source='arrays', path=str(tmp_path / 'shapes.npz')), 'eval.k': ()}
  (tmp_path / 'prompts.txt').write_text('a {}\n{0} a {} {color}\n')
  other = small('siglip', **changes, **{'eval.linear': '', 'eval.prompts': str(tmp_path / 'prompts.txt')})
  found = evaluate.evaluate(other, str(workdir))
  assert 0 <= found['zero_shot'] <= 100 and 'image_to_text_1' not in found
  assert json.loads((workdir / 'evaluation_shapes.json').read_text())['zero_shot'] == found['zero_shot']
  assert sum(found['classes']['test']) == len(labels) and 'train' not in found['classes']


@pytest.mark.slow
def test_the_image_encoder_can_be_transferred(trained):
  workdir, chosen = trained
  run, state = builder.build(chosen), final(workdir, chosen)[1]
  images = jax.vmap(run.views.eval_view)(run.eval_test.items)
  expected = run.method.features(*state.evaluated, images)['backbone']
  found = transfer.encoder_of(chosen, workdir).features(run.eval_test)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
