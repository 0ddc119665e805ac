"""Evaluation of runs and of stored features: correct numbers, reproducible digits, clear errors for unusable data."""

import errno
import json
import os
import shutil
import time

import jax
import numpy as np
import pytest
from PIL import Image

from configs import base
from ssl_jax import config, train
from ssl_jax.data import resolve
from ssl_jax.evals import evaluate, features, from_features, knn, linear, metrics, settings
from ssl_jax.evals.image_evaluator import ImageEvaluator, loss_settings
from ssl_jax.reporting import contact_sheet, figures, neighbors, report, views
from ssl_jax.run import builder
from ssl_jax.workdir import metric_log
from tests.helpers import final, tiny

pytestmark = pytest.mark.slow  # it trains and evaluates


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """(workdir, config, results) of a run of a few steps."""
  folder = tmp_path_factory.mktemp('run')
  chosen = tiny(folder, steps=4, **{'eval.k': (1, 5), 'eval.view_images': 10})
  summary = train.train(chosen, folder / 'run')
  results = evaluate.evaluate(chosen, folder / 'run')
  assert {k: summary[k] for k in ('knn1', 'knn5')} == {k: results[k] for k in ('knn1', 'knn5')}
  return folder / 'run', chosen, results


def stored(workdir):
  (file,) = (workdir / 'features').glob('*.npz')
  with np.load(file) as arrays:
    return file, dict(arrays)


def test_an_evaluation_has_the_numbers_of_the_functions(trained):
  workdir, _, results = trained
  _, x = stored(workdir)
  data = [x[f'{split}_{kind}'] for split in ('train', 'test') for kind in ('backbone', 'labels')]
  assert results['linear'] == linear.logistic(*data).report['top1']
  assert results['knn5'] == knn.accuracy(*data, k=(5,))['knn5']
  drawn = np.moveaxis(x['views_projector'], 1, 0)
  assert drawn.shape == (4, 10, 8)
  found = results['measures']['projector']
  assert found['alignment'] == metrics.alignment(drawn)
  assert found['lidar'] == metrics.lidar(drawn)
  assert found['uniformity'] == metrics.uniformity(x['test_projector'])
  same_label = metrics.same_label_similarity(x['train_projector'], x['train_labels'])
  assert found['train_uniformity'] == pytest.approx(metrics.uniformity(x['train_projector']), abs=1e-6)
  assert found['train_same_label_similarity'] == pytest.approx(same_label, abs=1e-6)
  assert found['penalty_entropy'] == metrics.penalty_entropy(x['test_projector'], 0.5)
  assert json.loads((workdir / 'evaluation.json').read_text()) == results


def test_evaluating_a_run_with_other_settings_keeps_its_config(trained, tmp_path):
  workdir, chosen, _ = trained
  copied = shutil.copytree(workdir, tmp_path / 'run')
  other = chosen.copy_and_resolve_references()
  other.eval.k = (3,)
  assert 'knn3' in evaluate.evaluate(other, copied)
  assert (copied / 'config.json').read_bytes() == (workdir / 'config.json').read_bytes()


@pytest.fixture(scope='module')
def another_set(tmp_path_factory):
  """Three classes of dark and bright images, of 10 pixels per side; `plain_images` have no labels."""
  labels = np.arange(30) % 3
  images = np.random.default_rng(1).normal(60 + 60 * labels[:, None, None, None], 10, (30, 10, 10, 3)).astype(np.uint8)
  path = tmp_path_factory.mktemp('another') / 'shades.npz'
  parts = dict(train_images=images[:18], train_labels=labels[:18], test_images=images[18:], test_labels=labels[18:])
  np.savez(path, **parts, plain_images=np.repeat(images, 2, axis=0))
  return path


def test_a_run_is_evaluated_on_another_set_besides_its_own(trained, another_set, tmp_path):
  workdir, chosen, results = trained
  copied = shutil.copytree(workdir, tmp_path / 'run')
  other = chosen.copy_and_resolve_references()
  for key, value in dict(name='shades/of grey', path=str(another_set)).items():
    config.override(other, f'eval.data.{key}', value)
  found = evaluate.evaluate(other, copied)
  assert (found['images']['train'], found['images']['test']) == (18, 12)
  assert len(found['classes']['test']) == 3 and found['knn5'] > 60  # brightness distinguishes them
  checksums = found['data'].pop('contents').split()  # test, training
  assert found['data'] == {'name': 'shades/of grey', 'train_split': 'train', 'test_split': 'test'}
  with np.load(another_set) as arrays:
    ends = dict(arrays)
  ends['train_images'] = 255 - ends['train_images']
  np.savez(tmp_path / 'other.npz', **ends)
  config.override(other, 'eval.data.path', str(tmp_path / 'other.npz'))
  again = evaluate.evaluate(other, copied)['data']['contents']
  assert [a == b for a, b in zip(checksums, again.split(), strict=True)] == [True, False]
  config.override(other, 'eval.data.path', str(another_set))
  found = evaluate.evaluate(other, copied)
  assert json.loads((copied / 'evaluation_shades_of_grey.json').read_text()) == found
  assert json.loads((copied / 'evaluation.json').read_text()) == results
  other.eval.finetune = 'linear'
  assert evaluate.evaluate(other, copied)['finetune'] > 60


def test_a_run_without_labels_is_evaluated_on_a_labelled_split(another_set, tmp_path):
  changes = {'data.path': str(another_set), 'data.train_split': 'plain', 'steps': 2, 'eval.at_end': True}
  fix = r'give labeled images with --config.eval.data.name and .path, or .train_split'
  with pytest.raises(ValueError, match=rf"^data.train_split = 'plain' .*{fix}"):
    train.train(tiny(tmp_path, **changes), tmp_path / 'run')
  summary = train.train(tiny(tmp_path, **changes, **{'eval.data.train_split': 'train'}), tmp_path / 'run')
  assert summary['images'] == 60
  found = json.loads((tmp_path / 'run' / 'evaluation.json').read_text())
  assert (found['images']['train'], found['images']['test'], found['knn5']) == (18, 12, summary['knn5'])


def test_broken_images_are_counted_in_training_and_excluded_from_evaluations(tmp_path):
  tiny(tmp_path)
  with np.load(tmp_path / 'data.npz') as arrays:
    for split in ('train', 'test'):
      for k, (image, label) in enumerate(zip(arrays[f'{split}_images'], arrays[f'{split}_labels'], strict=True)):
        file = tmp_path / 'images' / split / f'class{label}' / f'{k:02d}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
  for name in ('train/class0/00.png', 'train/class0/04.png', 'test/class1/01.png'):
    (tmp_path / 'images' / name).write_bytes(b'no image')
  folder = dict(source='folder', path=str(tmp_path / 'images'), on_device='no', workers=0, broken='skip')
  chosen = tiny(tmp_path, data=folder, steps=2, **{'eval.at_end': True, 'eval.view_images': 8})
  assert train.train(chosen, tmp_path / 'run')['broken_images_skipped'] == 3
  found = json.loads((tmp_path / 'run' / 'evaluation.json').read_text())
  assert found['broken_images_skipped'] == {'train': 2, 'test': 1}
  assert (found['images']['train'], found['images']['test']) == (62, 15)
  assert found['classes']['test'] == [4, 3, 4, 4]
  assert evaluate.evaluate(chosen, tmp_path / 'run') == found  # from the stored features


def test_an_error_in_eval_data_names_the_section(trained, tmp_path):
  workdir, chosen, _ = trained
  other = chosen.copy_and_resolve_references()
  other.eval.data.test_split = 'validation'
  with pytest.raises(ValueError, match=r'^eval\.data: .*not validation_images'):
    evaluate.evaluate(other, workdir)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'path': 'other.npz'}, r"eval\.data\.path = 'other\.npz' is another set: name it with eval\.data\.name"),
    ({'source': 'tfds'}, r"eval\.data\.source = 'tfds' is another set: name it with eval\.data\.name"),
    ({'name': 'cifar100'}, r"eval\.data\.name = 'cifar100' alone does not locate a set of data\.source = 'arrays'"),
  ],
)
def test_another_set_needs_a_name_and_a_location(trained, changes, message):
  workdir, chosen, _ = trained
  other = chosen.copy_and_resolve_references()
  other.eval.data.update(changes)
  with pytest.raises(ValueError, match='^' + message):
    evaluate.evaluate(other, workdir)


@pytest.mark.parametrize(
  ('section', 'fix'),
  [('data', r'the same split twice and data\.held_out=0\.1'), ('eval.data', 'such as a folder with train and val')],
)
def test_splits_with_common_images_are_refused_with_a_fix_for_their_section(tmp_path, section, fix):
  prepared = builder.build(tiny(tmp_path, **{f'{section}.test_split': 'train'}))
  with pytest.raises(ValueError, match=rf"^{section}\.test_split = 'train': 64 of its 64 images .*{fix}$"):
    ImageEvaluator(prepared)


def test_evaluations_crop_views_from_the_stored_size(tmp_path, monkeypatch):
  sizes, nothing = [], {'backbone': np.zeros((1, 1, 2)), 'projector': np.zeros((1, 1, 2))}
  monkeypatch.setattr(
    features, 'extract', lambda *given, size, batch_size: sizes.append(size) or (nothing, np.zeros(1))
  )
  prepared = builder.build(tiny(tmp_path, **{'data.image_size': 8, 'data.stored_size': 12}))
  ImageEvaluator(prepared).all_features(prepared.initial_state(), tmp_path / 'features')
  assert sizes == [8, 8, 12, 12, 12]  # training and test images, views, views of partners, one view of training images


def test_features_of_another_set_are_stored_under_another_name(tmp_path, monkeypatch):
  hashed = []
  monkeypatch.setattr(features, 'digest', lambda settings, *rest: hashed.append(settings['eval_data']) or 'name')
  monkeypatch.setattr(features, 'cached', lambda *_: dict.fromkeys(('train_skipped', 'test_skipped'), np.empty(0)))
  monkeypatch.setattr(ImageEvaluator, '_spaces', lambda self, arrays: arrays)
  for changes in ({}, {'eval.data': dict(name='other', path=tiny(tmp_path).data.path)}):
    prepared = builder.build(tiny(tmp_path, **changes))
    ImageEvaluator(prepared).all_features(prepared.initial_state(), tmp_path)
  assert [data['name'] for data in hashed] == ['tiny', 'other'] and 'path' not in hashed[0]


def test_another_test_split_keeps_the_training_images(tmp_path):
  prepared = builder.build(tiny(tmp_path, **{'eval.data.test_split': 'train'}))
  assert prepared.eval_train is prepared.train and len(prepared.eval_test) == 64


def test_the_online_probe_does_not_predict_the_classes_of_another_set(tmp_path):
  changes = {'online_probe': 0.1, 'eval.k': ()}
  for data, expected in (({}, {'online_probe'}), (dict(name='other', path=tiny(tmp_path).data.path), set())):
    prepared = builder.build(tiny(tmp_path, **changes, **({'eval.data': data} if data else {})))
    assert ImageEvaluator(prepared).scores(prepared.devices.replicate(prepared.initial_state())).keys() == expected


def test_another_source_does_not_inherit_the_path():
  chosen = config.load('configs/imagenet100.py', ['eval.data.name=cifar10', 'eval.data.source=tfds'])
  data = resolve.eval_data(chosen)
  assert (data['name'], data['source'], data['path'], data['classes']) == ('cifar10', 'tfds', '', '')
  assert resolve.eval_data(config.load('configs/imagenet100.py')) == chosen.data.to_dict()


def test_views_are_cropped_from_the_stored_size_to_the_encoder_s_size(trained, tmp_path):
  _, chosen, _ = trained
  larger = tiny(tmp_path, **{'data.image_size': 8, 'data.stored_size': 12})
  prepared = builder.build(larger)
  assert prepared.train.items.shape == (64, 12, 12, 3)
  np.testing.assert_array_equal(prepared.train.items, builder.build(chosen).train.items)
  squares, _ = features.squares(prepared.eval_test, np.arange(3), features.image_size(larger))
  assert squares.shape == (3, 8, 8, 3)
  view = jax.eval_shape(prepared.views.training[0], jax.random.key(0), prepared.train.items[0])
  assert view.shape == (8, 8, 3)


def test_without_training_any_batch_size_is_accepted(tmp_path):
  for batch_size in (34, 128):  # on 4 devices, of 64 images
    prepared = builder.build(tiny(tmp_path, **{'batch_size': batch_size, 'parallel.devices': 4}), trains=False)
    assert prepared.steps_per_epoch == 1


def test_views_are_drawn_without_reading_all_images(tmp_path):
  chosen = tiny(tmp_path, **{'data.on_device': 'no'})
  path = views.draw_views(chosen, tmp_path / 'host', images=3, draws=1)
  config.override(chosen, 'data.on_device', 'yes')
  assert path.read_bytes() == views.draw_views(chosen, tmp_path / 'device', images=3, draws=1).read_bytes()


def test_the_contact_sheet_has_every_view_of_an_image(tmp_path):
  chosen = tiny(tmp_path, small_crops=dict(number=1, size=6), **{'data.stored_size': 16})
  path = views.draw_views(chosen, tmp_path / 'views', images=3, draws=2)
  side = 12 * 8 + 2 * contact_sheet.GAP  # images of 12 pixels are enlarged eight times
  with Image.open(path) as sheet:
    strip = sheet.width - (1 + 2 * 3) * side  # with the position and the class of each image
    assert 0 < strip < side and sheet.height == 3 * side
    labels, pixels = np.split(np.asarray(sheet), [strip], axis=1)
    tiles = pixels.reshape(3, side, 7, side, 3).swapaxes(1, 2)
  assert all((row < 128).any() for row in np.split(labels, 3))
  small, large = tiles[:, 3], tiles[:, 1]
  blocks = lambda tile: tile[2:-2, 2:-2].reshape(6, 16, 6, 16, 3)
  assert all((blocks(tile) == blocks(tile)[:, :1, :, :1]).all() for tile in small)  # 6 pixels, enlarged
  assert not any((blocks(tile) == blocks(tile)[:, :1, :, :1]).all() for tile in large)


def test_class_accuracies_average_to_the_accuracy(trained):
  _, _, results = trained
  table = results['classes']
  for name in ('knn1', 'knn5', 'linear'):
    assert np.average(table[name], weights=table['test']) == pytest.approx(results[name])
    for accuracy, mistaken in zip(table[name], table[f'{name}_mistaken_for'], strict=True):
      assert (accuracy == 100) == (mistaken is None)


def test_a_second_evaluation_gives_the_same_digits_from_stored_features(trained, monkeypatch):
  workdir, chosen, results = trained
  before = (workdir / 'evaluation.json').read_bytes(), (workdir / 'evaluation.npz').read_bytes()
  with monkeypatch.context() as patched:
    patched.setattr(features, 'extract', None)  # calling it would fail
    assert evaluate.evaluate(chosen, workdir) == results
  assert before == ((workdir / 'evaluation.json').read_bytes(), (workdir / 'evaluation.npz').read_bytes())


def test_other_weights_settings_or_images_give_another_name(trained):
  _, chosen, _ = trained
  prepared = builder.build(chosen)
  weights = {'a': np.ones(3, np.float32)}
  name = features.digest({}, weights, prepared.train)
  assert name == features.digest({}, {'a': np.ones(3, np.float32)}, prepared.train)
  changed = prepared.train.subset(np.arange(len(prepared.train)))
  changed.items = changed.items.copy()
  changed.items[-1, -1, -1, -1] ^= 1
  others = [
    features.digest({'dtype': 1}, weights, prepared.train),
    features.digest({}, {'a': np.array([1, 1, 2], np.float32)}, prepared.train),
    features.digest({}, weights, changed),
    features.digest({}, weights, prepared.train, prepared.eval_test),
  ]
  assert len({name, *others}) == 5


def test_paths_in_the_home_directory_are_expanded(trained, tmp_path, monkeypatch):
  workdir, *_ = trained
  shutil.copytree(workdir, tmp_path / 'run')
  monkeypatch.setenv('HOME', str(tmp_path))
  path, _ = given(tmp_path)
  with pytest.raises(ValueError, match='holds a run: give another directory'):
    evaluate.evaluate(config_with(**{'eval.file': f'~/{path.name}'}), '~/run')
  assert 'knn5' in evaluate.evaluate(config_with(**{'eval.file': f'~/{path.name}'}), '~/features')
  assert report.FinishedRun.read('~/run').summary == json.loads((workdir / 'summary.json').read_text())


def test_only_the_newest_features_stay_stored(tmp_path):
  for name in ('a', 'b'):
    features.cached(tmp_path / 'features', name, lambda: {'x': np.arange(3)})
  assert [file.name for file in (tmp_path / 'features').iterdir()] == ['b.npz']


def test_what_a_killed_evaluation_wrote_is_removed_but_not_what_another_one_writes(tmp_path):
  (tmp_path / 'features').mkdir()
  for name, age in {'1.part': 7200, '2.part': 60}.items():
    (tmp_path / 'features' / name).write_bytes(b'PK')
    os.utime(tmp_path / 'features' / name, times=(time.time() - age,) * 2)
  features.cached(tmp_path / 'features', 'a', lambda: {'x': np.arange(3)})
  assert {file.name for file in (tmp_path / 'features').iterdir()} == {'2.part', 'a.npz'}


@pytest.mark.parametrize('content', [b'', b'PK', None])
def test_damaged_features_are_computed_again(tmp_path, content, capsys):
  compute = lambda: {'x': np.arange(1000)}
  features.cached(tmp_path / 'features', 'a', compute)
  file = tmp_path / 'features' / 'a.npz'
  stored = file.read_bytes()
  file.write_bytes(stored[:200] + b'!' + stored[201:] if content is None else content)
  np.testing.assert_array_equal(features.cached(tmp_path / 'features', 'a', compute)['x'], np.arange(1000))
  assert 'a.npz cannot be read' in capsys.readouterr().err
  assert file.read_bytes() == stored


def test_features_that_cannot_be_stored_are_not_lost(tmp_path, monkeypatch, capsys):
  """Those of ImageNet take hours, and more space than a workdir may have left."""

  def full(stream, **arrays):
    stream.write(b'PK')
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(np, 'savez', full)
  assert features.cached(tmp_path / 'features', 'a', lambda: {'x': 3}) == {'x': 3}
  said = capsys.readouterr().err
  assert 'features cannot be written (No space left on device): the next evaluation computes' in said
  assert said.count('\n') == 1 and not list((tmp_path / 'features').iterdir())


def test_two_evaluations_may_store_features_at_once(tmp_path, monkeypatch):
  folder, save = tmp_path / 'features', np.savez

  def interrupted(stream, **arrays):
    monkeypatch.setattr(np, 'savez', save)
    monkeypatch.setattr(os, 'getpid', lambda: 1)
    features.cached(folder, 'a', lambda: {'x': np.arange(3)})  # another process, which is faster
    save(stream, **arrays)

  monkeypatch.setattr(np, 'savez', interrupted)
  features.cached(folder, 'a', lambda: {'x': np.arange(3)})
  assert [file.name for file in folder.iterdir()] == ['a.npz']


@pytest.mark.slow
def test_the_online_probe_sees_plain_images(tmp_path):
  train.train(tiny(tmp_path, online_probe=0.1), tmp_path / 'run')
  found = []
  for changes in ({}, {'eval.patches': 2, 'eval.patch': 1.0}, {'eval.flip': True}):
    chosen = tiny(tmp_path, online_probe=0.1, **changes)
    run = builder.build(chosen)
    state = run.devices.replicate(final(tmp_path / 'run', chosen)[1])
    found.append(ImageEvaluator(run).scores(state)['online_probe'])
  assert len(set(found)) == 1


@pytest.mark.slow
def test_measures_and_linear_accuracies_are_logged_without_knn(tmp_path):
  changes = {'eval.k': (), 'eval.measures': True, 'eval.linear_during': True, 'eval.every_epochs': 1, 'eval.views': 2}
  train.train(tiny(tmp_path, steps=2, **changes), tmp_path / 'run')
  (row,) = (row for row in metric_log.read(tmp_path / 'run') if 'linear' in row)
  assert 'backbone/uniformity' in row and not any(key.startswith('knn') for key in row)


def test_a_small_training_split_within_the_test_split_is_refused(tmp_path):
  with np.load(tiny(tmp_path).data.path) as stored:
    labels = stored['train_labels']
    few = np.concatenate([np.flatnonzero(labels == c)[:5] for c in range(4)])
    images = dict(train_images=stored['train_images'][few], train_labels=labels[few])
    np.savez(tmp_path / 'few.npz', **images, test_images=stored['train_images'], test_labels=labels)
  chosen = tiny(tmp_path, **{'data.path': str(tmp_path / 'few.npz'), 'batch_size': 4})
  with pytest.raises(ValueError, match='20 of its 64 images are also in data'):
    ImageEvaluator(builder.build(chosen))


def test_views_do_not_depend_on_the_devices_or_the_batch(trained):
  """Random keys depend only on the position of an image."""
  _, chosen, _ = trained
  found = []
  for devices, batch_size in ((1, 40), (2, 12)):
    config.override(chosen, 'parallel.devices', devices)
    prepared = builder.build(chosen)
    state = prepared.initial_state()
    apply = features.view_extractor(prepared.method, prepared.views.training, prepared.devices, seed=3)
    params, stats = prepared.devices.replicate((state.params, state.batch_stats))
    sizes = dict(size=12, batch_size=batch_size)
    extracted, labels = features.extract(apply, prepared.devices, params, stats, prepared.eval_test, **sizes)
    np.testing.assert_array_equal(labels, prepared.eval_test.labels)
    found.append(extracted['projector'])
  config.override(chosen, 'parallel.devices', 1)
  assert found[0].shape == (16, 2, 8)
  assert not np.allclose(found[0][:, 0], found[0][:, 1], atol=1e-3), 'views differ'
  np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_partners_get_the_same_augmentations(trained, monkeypatch):
  """An image that is its own partner has the same views; another image, or another position, has different views."""
  _, chosen, _ = trained
  prepared = builder.build(chosen)
  state = prepared.devices.replicate(prepared.initial_state())
  evaluator = ImageEvaluator(prepared)
  order = np.arange(10)
  same = np.flatnonzero(evaluator._view_source.labels == evaluator._view_source.labels[0])
  order[0] = same[1]
  monkeypatch.setattr(metrics, 'same_label_partners', lambda labels, rng: order)
  spaces, labels = evaluator.spaces(state, views=True)
  own, partners = spaces['projector'].views, spaces['projector'].partners
  np.testing.assert_allclose(partners[:, 1:], own[:, 1:], rtol=1e-4, atol=1e-5)
  for other in (0, order[0]):  # another image, and the same one at another position
    assert not np.allclose(partners[:, 0], own[:, other], atol=1e-3)
  found = from_features.measures(spaces['projector'], labels, from_features.LossSettings())['prototype_bias_sampled']
  assert found == pytest.approx(metrics.prototype_bias_sampled(own, partners))


def test_measures_take_their_settings_from_the_loss_of_the_run(tmp_path):
  cases = (
    ({'temperature.tau': 0.25}, (4.0, 2.0)),
    ({'loss.name': 'balanced', 'loss.alpha': 3.0, 'loss.lam': 2.0, 'temperature.name': 'none'}, (3.0, 2.0)),
    ({'loss.name': 'cacr', 'loss.t_neg': 0.9, 'temperature.name': 'none'}, (2.0, 0.9)),
    ({'loss.name': 'macl', 'loss.alpha': 0.7, 'temperature.name': 'none'}, (2.0, 2.0)),  # its alpha is not 1 / tau
  )
  for changes, expected in cases:
    prepared = builder.build(tiny(tmp_path, steps=4, **changes))
    evaluator = ImageEvaluator(prepared)
    found = loss_settings(prepared, 0, {})
    assert (found.alpha, found.t_neg) == expected
    assert found.batch_size == prepared.config.batch_size
  state = prepared.devices.replicate(prepared.initial_state())
  spaces, labels = evaluator.spaces(state, views=True)
  assert len(spaces['projector'].bank) == len(prepared.eval_train), 'one view of every training image'
  np.testing.assert_array_equal(labels.bank, prepared.eval_train.labels)
  assert not np.allclose(spaces['projector'].bank, spaces['projector'].train), 'it is augmented'


def test_measures_during_training_equal_those_of_the_evaluation(tmp_path, capsys):
  chosen = tiny(tmp_path, **{'steps': 4, 'eval.every_epochs': 1, 'eval.measures': True, 'eval.at_end': True})
  train.train(chosen, tmp_path / 'run')
  rows = [row for row in metric_log.read(tmp_path / 'run') if 'knn5' in row]
  assert [row['step'] for row in rows] == [2, 4]
  measured = json.loads((tmp_path / 'run' / 'evaluation.json').read_text())['measures']
  assert {'conditional_entropy', 'attracting_gap', 'repelling_gap', 'penalty_entropy'} <= measured['projector'].keys()
  for layer, numbers in measured.items():
    for name, value in numbers.items():
      assert rows[1][f'{layer}/{name}'] == pytest.approx(value, rel=1e-5), name
  assert rows[0]['backbone/uniformity'] != rows[1]['backbone/uniformity']
  assert 'uniformity' not in capsys.readouterr().out
  drawn = figures.training(metric_log.read(tmp_path / 'run'))
  assert {'uniformity', 'entropy', 'gaps'} <= drawn.keys()
  (legend,) = figures.chart(drawn['gaps']).legends
  assert [text.get_text() for text in legend.get_texts()] == ['attracting', 'repelling']


def test_evaluations_show_the_centre_crop_of_the_config(tmp_path):
  found = {}
  for crop in (1.0, 0.5):
    prepared = builder.build(tiny(tmp_path, steps=4, **{'eval.crop': crop}))
    state = prepared.devices.replicate(prepared.initial_state())
    evaluator = ImageEvaluator(prepared)
    before = evaluator.spaces(state)[0]['backbone'].test
    prepared.eval_test.items[:, :2] = 255 - prepared.eval_test.items[:, :2]  # the top two of 12 rows
    found[crop] = before, evaluator.spaces(state)[0]['backbone'].test
  np.testing.assert_array_equal(*found[0.5])
  for other in (found[1.0][1], found[0.5][0]):
    assert not np.allclose(found[1.0][0], other, atol=1e-3)


@pytest.mark.slow
def test_features_may_be_those_of_an_image_and_its_mirror_image(tmp_path):
  found = {}
  for flip in (False, True):
    prepared = builder.build(tiny(tmp_path, **{'eval.flip': flip}))
    state = prepared.devices.replicate(prepared.initial_state())
    evaluator = ImageEvaluator(prepared)
    own = evaluator.spaces(state)[0]
    prepared.eval_test.items[:] = prepared.eval_test.items[:, :, ::-1].copy()
    found[flip] = [{layer: space.test for layer, space in each.items()} for each in (own, evaluator.spaces(state)[0])]
  unit = lambda x: x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
  for layer in ('backbone', 'projector'):
    (image, mirror), (mean, same) = ([each[layer] for each in found[flip]] for flip in (False, True))
    assert not np.allclose(image, mirror, atol=1e-3)
    np.testing.assert_allclose(mean, (unit(image) + unit(mirror)) / 2, atol=1e-5)
    np.testing.assert_allclose(same, mean, atol=1e-5)


def with_features(tmp_path, spaces, labels, **changes):
  """The evaluator of a run, with given features instead of those of an encoder."""
  evaluator = ImageEvaluator(builder.build(tiny(tmp_path, **changes)))
  evaluator.spaces = lambda state, layers, views: ({layer: spaces[layer] for layer in layers}, labels)
  return evaluator


@pytest.mark.parametrize(
  ('vote', 'temperature', 'right'),
  [('cosine', 0.1, True), ('cosine', 1.0, False), ('majority', 0.1, False), ('distance', 1.0, True)],
)
def test_during_training_neighbors_vote_as_configured(tmp_path, vote, temperature, right):
  """One very near neighbor of the right class against two of another: similarities 1 and 0.8."""
  bank, query = np.array([[1, 0.03], [0.8, 0.6], [0.8, -0.6]], np.float32), np.array([[1, 0]], np.float32)
  found = {'backbone': from_features.Space(bank, query)}, from_features.Labels(np.array([1, 0, 0]), np.array([1]))
  changes = {'eval.k': (3,), 'eval.vote': vote, 'eval.temperature': temperature}
  assert with_features(tmp_path, *found, **changes).scores(None) == {'knn3': 100 * right}


def test_neighbors_may_also_be_found_among_whitened_features(tmp_path):
  """The class is the sign of the last feature, which varies little."""
  rng, labels = np.random.default_rng(0), np.arange(60) % 2
  sign = 2 * labels[:, None] - 1
  x = np.concatenate([rng.normal(size=(60, 2)), 0.05 * sign], axis=1).astype(np.float32)
  found = {'backbone': from_features.Space(x[:50], x[50:])}, from_features.Labels(labels[:50], labels[50:])
  evaluator = with_features(tmp_path, *found, **{'eval.k': (1,), 'eval.whiten': True})
  scores = evaluator.scores(None)
  assert scores.keys() == {'knn1', 'knn1_white'} and scores['knn1'] < scores['knn1_white']
  settings = {**evaluator.run.config.eval, 'linear': ''}
  numbers, _ = from_features.accuracies(found[0]['backbone'], found[1], settings)
  assert {key: numbers[key] for key in scores} == scores


@pytest.fixture
def layers(tmp_path, monkeypatch):
  """layer -> (evaluator, the training image nearest to each test image in that layer)"""
  rng = np.random.default_rng(0)
  draw = lambda count: {name: rng.normal(size=(count, 5)).astype(np.float32) for name in ('backbone', 'projector')}
  bank, queries, labels = draw(64), draw(16), np.arange(80) % 4

  def choose(layer, **changes):
    found = (
      {name: from_features.Space(bank[name], queries[name]) for name in bank},
      from_features.Labels(labels[:64], labels[64:]),
    )
    evaluator = with_features(tmp_path, *found, **{'eval.k': (1,), 'eval.features': layer}, **changes)
    evaluator.all_features = lambda state, folder: found
    unit = bank[layer] / np.linalg.norm(bank[layer], axis=1, keepdims=True)
    return evaluator, np.argmax(queries[layer] @ unit.T, axis=1)

  monkeypatch.setattr(from_features, 'evaluate_features', lambda *args, loss: ({'temperature': loss.temperature}, {}))
  return choose


def test_during_training_only_the_needed_layers_are_extracted(tmp_path, monkeypatch):
  extracted = []
  monkeypatch.setattr(features, 'extractor', lambda method, shown, devices, layers, around: extracted.append(layers))
  wanted = {
    'backbone': {},
    'projector': {'eval.features': 'projector'},
    'backbone and projector': {'eval.features': 'projector', 'online_probe': 0.1},
    'projector and backbone': {'eval.measures': True},
  }
  for changes in wanted.values():
    evaluator = ImageEvaluator(builder.build(tiny(tmp_path, **changes)))
    with pytest.raises(TypeError):  # the extractor is None
      evaluator.scores(evaluator.run.devices.replicate(evaluator.run.initial_state()))
  assert [' and '.join(sorted(layers)) for layers in extracted] == [
    ' and '.join(sorted(key.split(' and '))) for key in wanted
  ]


@pytest.mark.parametrize('layer', ['backbone', 'projector'])
def test_during_training_the_layer_is_that_of_the_config(layers, layer, tmp_path, monkeypatch):
  evaluator, nearest = layers(layer)
  assert evaluator.scores(None) == {'knn1': pytest.approx(100 * np.mean(nearest % 4 == np.arange(16) % 4))}
  drawn = []
  draw = figures.neighbors
  monkeypatch.setattr(figures, 'neighbors', lambda rows, labels: drawn.append((rows, labels)) or draw(rows, labels))
  neighbors.draw(evaluator, tmp_path)
  ((rows, labels),) = drawn
  assert (tmp_path / 'neighbors.png').exists()
  np.testing.assert_array_equal(rows[:, 1], evaluator.run.train.items[nearest[:4]])
  np.testing.assert_array_equal(labels[:, 1], nearest[:4] % 4, 'the frames show the classes')


@pytest.mark.parametrize('layer', ['backbone', 'projector'])
def test_the_neighbors_at_the_end_are_those_of_the_configured_layer(layers, layer, tmp_path):
  evaluator, nearest = layers(layer)
  evaluator.evaluate(evaluator.run.initial_state(), tmp_path)
  with np.load(tmp_path / 'evaluation.npz') as arrays:
    np.testing.assert_array_equal(arrays['neighbors'][:, 1], evaluator.run.train.items[nearest[:4]])


def test_a_run_is_evaluated_at_the_temperature_of_its_step(layers, tmp_path):
  evaluator, _ = layers('backbone', steps=20, temperature=dict(name='linear_schedule', start=0.1, end=0.5))
  state = evaluator.run.initial_state()
  for step, tau in ((0, 0.1), (5, 0.2), (20, 0.5)):
    found = evaluator.evaluate(state.replace(step=np.int32(step)), tmp_path)
    assert found['temperature'] == pytest.approx(tau)


def given(tmp_path, **changes):
  """An .npz file of features: two separate classes and one that overlaps with both."""
  rng = np.random.default_rng(0)
  centres = np.array([[4, 0, 0, 0, 0], [0, 4, 0, 0, 0], [2, 2, 0, 0, 0]], np.float32)
  arrays = {}
  for split, count in (('train', 60), ('test', 30)):
    labels = np.arange(count) % 3
    arrays |= {f'{split}_labels': labels}
    arrays |= {f'{split}_features': centres[labels] + rng.normal(size=(count, 5)).astype(np.float32)}
  arrays |= changes
  np.savez(tmp_path / 'given.npz', **{k: v for k, v in arrays.items() if v is not None})
  return tmp_path / 'given.npz', arrays


def config_with(**changes):
  chosen = base.get_config()
  for key, value in {'eval.k': (5,), **changes}.items():
    config.override(chosen, key, value)
  return chosen


@pytest.mark.parametrize('protocol', ['', 'ridge', 'cacr_small'])
def test_features_from_a_file_are_evaluated_like_those_of_a_run(tmp_path, protocol):
  path, x = given(tmp_path)
  chosen = config_with(**{'eval.file': str(path), 'eval.linear': protocol, 'eval.seeds': (1, 2)})
  results = evaluate.evaluate(chosen, tmp_path / 'out')
  data = (x['train_features'], x['train_labels'], x['test_features'], x['test_labels'])
  assert results['knn5'] == knn.accuracy(*data, k=(5,))['knn5']
  assert ('linear' in results) == bool(protocol)
  if protocol == 'cacr_small':
    report = linear.fit(*data, protocol, seeds=(1, 2)).report
    assert (results['linear'], results['linear_std']) == (report['top1'], report['top1_std'])
  assert results['measures']['backbone']['rankme'] == metrics.rankme(x['test_features'])
  assert json.loads((tmp_path / 'out' / 'evaluation.json').read_text()) == results


def test_long_tails_have_head_middle_and_tail_accuracies():
  rng = np.random.default_rng(0)
  labels = from_features.Labels(np.repeat([0, 1, 2], [30, 10, 3]), np.arange(30) % 3)
  space = from_features.Space(rng.normal(size=(43, 6)).astype(np.float32), rng.normal(size=(30, 6)).astype(np.float32))
  results, _ = from_features.evaluate_features({'backbone': space}, labels, config_with(**{'eval.linear': ''}).eval)
  accuracies = results['classes']['knn5']
  assert [results[f'knn5_{third}'] for third in ('head', 'middle', 'tail')] == accuracies


def test_the_map_shows_the_principal_components():
  x = np.random.default_rng(0).normal(size=(50, 4)) * np.array([3, 2, 1, 0.5])
  found = from_features.plane(x.astype(np.float32), np.zeros(50, int))
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  u, s, _ = np.linalg.svd(unit - unit.mean(axis=0), full_matrices=False)
  np.testing.assert_allclose(np.abs(found['map']), np.abs(u[:, :2] * s[:2]), atol=1e-5)
  np.testing.assert_allclose(found['map_shares'], s[:2] ** 2 / np.sum(s**2), rtol=1e-5)


@pytest.mark.parametrize(
  ('changes', 'chosen', 'message'),
  [
    ({'test_labels': None}, {}, 'has no test_labels: give train_features, train_labels, test_features, test_labels'),
    ({'test_labels': np.r_[-1, np.arange(29) % 3]}, {}, 'test labels: 1 negative .missing. labels; drop'),
    ({'test_labels': np.arange(30) % 4}, {}, r'test labels: classes \[3\] do not occur in train labels'),
    ({'train_labels': np.zeros(60, int)}, {}, 'train labels: every example is of class 0; expected at least 2'),
    ({'test_labels': np.ones(30, int)}, {}, 'test labels: every example is of class 1; expected at least 2'),
    ({'train_labels': np.arange(59) % 3}, {}, r'train labels: shape \(59,\), expected \(60,\)'),
    (
      {'test_features': np.zeros((30, 4), np.float32)},
      {},
      '^eval.file: test_features: 4 dimensions, but eval.file: train_features has 5',
    ),
    ({'train_features': np.full((60, 5), np.nan, np.float32)}, {}, '^eval.file: train_features: holds NaN or infinity'),
    ({'train_features': np.full((60, 5), 1e30, np.float32)}, {}, 'rows with a norm above 1e19'),
    ({'train_features': np.float32(1)}, {}, r'^eval.file: train_features: shape \(\), expected'),
    ({'train_features': np.full((60, 5), 'a')}, {}, r'given.npz. has train_features of dtype <U1: store real numbers'),
    ({'test_features': np.ones((30, 5), complex)}, {}, 'has test_features of dtype complex128: store real numbers'),
    ({'test_features': np.ones((30, 5), [('x', 'f4')])}, {}, 'has test_features of dtype .*: store real numbers'),
    ({'train_labels': np.int64(1)}, {}, r'train labels: shape \(\), expected \(60,\)'),
    ({'train_features': np.full((60, 5), 'a', object)}, {}, r'given.npz. cannot be read \(Object arrays'),
    ({}, {'eval.k': (61,)}, r'eval.k = \(61,\) must not exceed the 60 training features'),
  ],
)
def test_unusable_features_are_refused_in_one_line(tmp_path, changes, chosen, message):
  path, _ = given(tmp_path, **changes)
  with pytest.raises(ValueError, match=message) as error:
    evaluate.evaluate(config_with(**chosen, **{'eval.file': str(path)}), tmp_path / 'out')
  assert '\n' not in str(error.value)
  assert not (tmp_path / 'out' / 'evaluation.json').exists()


def test_a_missing_file_and_an_occupied_workdir_are_refused(trained, tmp_path):
  workdir, *_ = trained
  path, _ = given(tmp_path)
  with pytest.raises(ValueError, match='holds a run: give another directory'):
    evaluate.evaluate(config_with(**{'eval.file': str(path)}), workdir)
  with pytest.raises(ValueError, match=r"eval.file = '.*nothing.npz' is not an .npz file"):
    evaluate.evaluate(config_with(**{'eval.file': str(tmp_path / 'nothing.npz')}), tmp_path / 'out')


@pytest.mark.parametrize(
  ('train_labels', 'test_labels', 'message'),
  [
    (np.arange(32) % 2, np.arange(32) % 3, r"data.test_split = 'test': classes \['class 2'\] do not occur in the t"),
    (np.zeros(32, int), np.arange(32) % 2, "data.train_split = 'train' has only the class 'class 0': add images of an"),
    (np.arange(32) % 2 - 1, np.arange(32) % 2, "data.train_split = 'train' .* has no labels"),
  ],
)
def test_unusable_labels_are_refused_before_training(tmp_path, train_labels, test_labels, message):
  images = np.random.default_rng(0).integers(0, 256, (32, 12, 12, 3), np.uint8)
  data = dict(train_images=images, test_images=images, train_labels=train_labels, test_labels=test_labels)
  np.savez(tmp_path / 'odd.npz', **data)
  with pytest.raises(ValueError, match=message):
    train.train(tiny(tmp_path, **{'data.path': str(tmp_path / 'odd.npz')}), tmp_path / 'run')


def test_the_evaluation_at_the_end_of_training_equals_that_of_the_command(trained, tmp_path):
  """`eval.at_end` gives the same numbers as --mode=evaluate."""
  _, chosen, results = trained
  chosen = config.restore(chosen.to_dict(), base.get_config(), ['eval.at_end=True'])
  train.train(chosen, tmp_path / 'run')
  assert json.loads((tmp_path / 'run' / 'evaluation.json').read_text()) == results


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('features', 'backbon', r"eval\.features = 'backbon' is not a valid choice: did you mean 'backbone'\?"),
    ('train_images', 'some', r"eval\.train_images = 'some' is not a valid choice: give one of kept, all"),
    ('vote', 'cosin', r"eval\.vote = 'cosin' is not a valid choice: did you mean 'cosine'\?"),
    ('linear', 'cacr_smal', r"eval\.linear = 'cacr_smal' is not a valid choice: did you mean 'cacr_small'\?"),
    ('finetune', 'linear 20%', r"eval\.finetune = 'linear 20%' is not a valid choice: did you mean 'linear 10%'\?"),
  ],
)
def test_invalid_choices_are_refused(tmp_path, key, value, message):
  settings.check(base.get_config().eval)
  with pytest.raises(ValueError, match='^' + message):
    evaluate.evaluate(config_with(**{f'eval.{key}': value}), tmp_path)


def test_every_choice_is_accepted():
  for key, known in settings.CHOICES.items():
    for value in known:
      settings.check(config_with(**{f'eval.{key}': value}).eval)


@pytest.mark.slow
def test_the_linear_classifier_during_training_is_that_of_the_evaluation(tmp_path):
  changes = {
    'steps': 4,
    'eval.every_epochs': 1,
    'eval.linear': 'ridge',
    'eval.linear_during': True,
    'eval.at_end': True,
  }
  train.train(tiny(tmp_path, **changes), tmp_path / 'run')
  rows = [row for row in metric_log.read(tmp_path / 'run') if 'linear' in row]
  assert [row['step'] for row in rows] == [2, 4]
  assert rows[-1]['linear'] == json.loads((tmp_path / 'run' / 'evaluation.json').read_text())['linear']
