"""What a newcomer does in the first hour, through the command line: own images, own features, own sentences."""

import json
import os
import pathlib
import re
import time

import numpy as np
import pytest
from absl import flags
from PIL import Image

import main
from configs import base
from ssl_jax import config
from ssl_jax import train as loop
from ssl_jax.data import resolve, sources
from ssl_jax.evals import knn
from ssl_jax.evals.evaluate import evaluator_of
from ssl_jax.run import builder
from ssl_jax.workdir import metric_log
from tests.helpers import call, tiny

pytestmark = pytest.mark.slow  # it trains, evaluates and compares

ROOT = pathlib.Path(__file__).parent.parent
CLASSES = ('cat', 'dog', 'owl')

# Small enough to be compiled and trained in seconds.
QUICK = (
  '--config=configs/folder.py',
  '--config.data.image_size=12',
  '--config.data.stored_size=16',
  '--config.model.width=4',
  '--config.model.stage_sizes=(1,)',
  '--config.projector.features=(8,8)',
  '--config.augment.jitter=0.0',
  '--config.augment.grey=0.0',
  '--config.batch_size=8',
  '--config.parallel.devices=1',
  '--config.log.tensorboard=False',
)


def picture(label, seed):
  rng = np.random.default_rng((label, seed))
  color = np.random.default_rng(label).uniform(40, 215, 3)
  return np.clip(color + rng.normal(0, 20, (20, 24, 3)), 0, 255).astype(np.uint8)


def fill(folder, count, first=0, classes=CLASSES):
  """Writes `count` pictures per class into class folders, or all into one folder if `classes` is empty."""
  for label, name in enumerate(classes or CLASSES):
    for k in range(first, first + count):
      file = folder / (name if classes else '') / (f'{k:03d}.png' if classes else f'{name}{k:03d}.png')
      file.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(picture(label, k)).save(file)


def go(*arguments):
  """Runs main.py with these arguments in this process."""
  flags.FLAGS.unparse_flags()
  main.run(
    main.parse(flags.FLAGS(['main.py', '--config=', '--workdir=', '--mode=train', *arguments], known_only=True)[1:])
  )


def fails(*arguments):
  said = call('--config=', '--workdir=', '--mode=train', *arguments)
  assert said.startswith('ssl_jax: ') and '\n' not in said
  return said


def chosen(path, *more):
  given = [argument.removeprefix('--config.') for argument in (*QUICK[1:], f'--config.data.path={path}', *more)]
  loaded = config.load('configs/folder.py', given)
  config.validate(loaded, base.get_config())
  return loaded


def splits(path, *more):
  loaded = chosen(path, *more)
  return [resolve.open_split(loaded, split) for split in ('train', 'test')]


def names(source):
  return {os.path.relpath(path, source.root) for path in source.items}


# Own images: which are trained on, which are tested


def test_folders_named_train_and_val_are_the_splits(tmp_path):
  fill(tmp_path / 'train', 6)
  fill(tmp_path / 'Val', 3, first=6)
  train, test = splits(tmp_path)
  assert (len(train), len(test), train.class_names) == (18, 9, CLASSES)
  assert sources.same_images(train, test) == []


def test_class_folders_without_splits_are_divided_by_a_hash_of_the_names(tmp_path):
  fill(tmp_path / 'birds', 20)
  train, test = splits(tmp_path / 'birds')
  assert np.bincount(test.labels).tolist() == [2, 2, 2] and np.bincount(train.labels).tolist() == [18, 18, 18]
  assert not names(train) & names(test)
  again = splits(tmp_path / 'birds', '--config.seed=7')
  assert [names(source) for source in again] == [names(train), names(test)]
  (tmp_path / 'birds').rename(tmp_path / 'moved')
  assert names(splits(tmp_path / 'moved')[1]) == names(test)
  held = sources.held_out(_named(20), 0.1).nonzero()[0].tolist()
  assert held == [6, 18], 'the choice must never change: results would not be comparable'


def _named(count):
  """A source without labels whose names are '0', '1', ..."""
  return sources.Arrays(np.zeros((count, 1, 1, 3), np.uint8))


@pytest.mark.parametrize(('count', 'share', 'held'), [(2, 0.1, 1), (1, 0.5, 0), (3, 0.99, 2), (200, 0.25, 50)])
def test_the_share_that_is_held_out(count, share, held):
  assert sources.held_out(_named(count), share).sum() == held


def test_a_folder_with_train_alone_is_divided(tmp_path):
  fill(tmp_path / 'train', 10)
  train, test = splits(tmp_path)
  assert (len(train), len(test)) == (27, 3)


def test_a_set_is_named_after_its_folder(tmp_path):
  fill(tmp_path / 'birds', 4)
  assert chosen(f'{tmp_path}/birds/').data.name == 'birds'
  assert chosen(tmp_path / 'birds', '--config.data.name=mine').data.name == 'mine'


def test_the_default_workdir_has_the_name_of_the_set(tmp_path, monkeypatch):
  called = []
  monkeypatch.setattr('ssl_jax.reporting.export.export', lambda *given: called.append(given[-1]))
  go('--mode=export', '--config=configs/folder.py:gpu', f'--config.data.path={tmp_path}/birds', '--config.seed=1')
  assert called == ['runs/folder_birds_gpu_seed=1']


@pytest.mark.slow
def test_class_folders_train_and_give_the_accuracy_of_the_held_out_images(tmp_path, monkeypatch, capsys):
  """kNN of the run is that of the features of its images, and is lower than if the test images were in the bank."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  fill(tmp_path / 'birds', 12)
  path = f'--config.data.path={tmp_path}/birds'
  go(*QUICK, path, '--config.epochs=2')
  said = capsys.readouterr().out
  assert 'birds (33 images)' in said and 'runs/folder_birds' in said
  (workdir,) = (tmp_path / 'runs').iterdir()
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['images'] == 33
  go('--mode=evaluate', f'--workdir={workdir}')
  found = json.loads((workdir / 'evaluation.json').read_text())
  assert set(found['data']) == {'name', 'train_split', 'test_split', 'contents', 'sizes'}
  assert found['data'].items() >= {'name': 'birds', 'train_split': '', 'test_split': ''}.items()
  assert (found['images']['train'], found['images']['test']) == (33, 3)
  (file,) = (workdir / 'features').glob('*.npz')
  with np.load(file) as stored:
    arrays = dict(stored)
  wanted = knn.accuracy(
    *(arrays[f'{split}_{what}'] for split in ('train', 'test') for what in ('backbone', 'labels')), k=(11,), topk=(1,)
  )
  assert found['knn11'] == summary['knn11'] == wanted['knn11']  # the smallest class has 11 images


@pytest.mark.slow
def test_flat_images_are_refused_with_the_way_to_train_and_train_that_way(tmp_path, capsys):
  fill(tmp_path / 'flat', 8, classes=())
  path, workdir = f'--config.data.path={tmp_path}/flat', f'--workdir={tmp_path}/run'
  said = fails(*QUICK, path, workdir)
  assert 'has no labels, and evaluations need them: sort them into class folders' in said
  assert "'--config.eval.k=()' and --config.data.held_out=0" in said
  assert not (tmp_path / 'run').exists()
  unlabeled = QUICK[0] + ':unlabeled'
  go(unlabeled, *QUICK[1:], path, workdir, '--config.steps', '2')
  assert json.loads((tmp_path / 'run' / 'summary.json').read_text())['images'] == 24
  assert 'compiling' in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_step_is_shown_at_once_and_compilation_does_not_count(tmp_path, monkeypatch, capsys):
  calls = loop._calls

  def slow_to_compile(run, step):
    for place, (steps, count) in enumerate(calls(run, step)):
      yield (lambda state, steps=steps, place=place: (time.sleep(0 if place else 20), steps(state))[1]), count

  monkeypatch.setattr(loop, '_calls', slow_to_compile)
  loop.train(tiny(tmp_path, steps=4, **{'eval.k': (), 'log.every_steps': 4}), tmp_path / 'run')
  lines = capsys.readouterr().out.splitlines()
  assert lines[1] == 'compiling the training step ...' and lines[2].startswith('compiled in ')
  assert lines[3].startswith('step 1/4 ') and 'ETA' not in lines[3]
  assert lines[4].startswith('step 4/4 ') and 'ETA' in lines[4]
  (row,) = metric_log.read(tmp_path / 'run')  # the first step has no row of its own
  assert row['images_per_second'] > 4 * 32 / 20


# Test images that are training images


def refused(loaded):
  with pytest.raises(ValueError, match=r'are also in data[.]train_split') as error:
    evaluator_of(builder.build(loaded))
  assert '\n' not in str(error.value) and 'data.held_out=0.1' in str(error.value)
  return str(error.value)


def test_the_same_folder_twice_is_refused(tmp_path):
  fill(tmp_path / 'birds', 4)
  said = refused(chosen(tmp_path / 'birds', '--config.data.held_out=0'))
  assert said.startswith("data.test_split = '': 12 of its 12 images are also in data.train_split = ''")


def test_links_between_the_images_of_a_folder_are_refused(tmp_path):
  fill(tmp_path / 'birds', 20)
  for image in sorted((tmp_path / 'birds').rglob('*.png')):
    image.with_name(f'link_{image.name}').symlink_to(image)
  with pytest.raises(
    ValueError, match=r'are also in data[.]train_split .*: remove links to other images of the folder$'
  ) as error:
    evaluator_of(builder.build(chosen(tmp_path / 'birds')))
  first = re.search(r'\(first: (\S+) is (\S+)\)', str(error.value))
  assert first and first[1] != first[2] and os.path.samefile(first[1], first[2])


@pytest.mark.parametrize('linked', ['split', 'class', 'file'])
def test_folders_that_share_files_through_links_are_refused(tmp_path, linked):
  fill(tmp_path / 'train', 4)
  if linked == 'split':
    (tmp_path / 'test').symlink_to(tmp_path / 'train')
  else:
    fill(tmp_path / 'test', 2, first=9, classes=CLASSES[:2])
    (tmp_path / 'test' / 'owl').mkdir()
    target, link = (tmp_path / split / 'owl' / '001.png' for split in ('train', 'test'))
    if linked == 'class':
      link.parent.rmdir()
      target, link = target.parent, link.parent
    link.symlink_to(target)
  count = {'split': '12 of its 12', 'class': '4 of its 8', 'file': '1 of its 5'}[linked]
  assert f"data.test_split = 'test': {count} images" in refused(chosen(tmp_path))


def test_equal_arrays_are_refused_and_a_few_duplicates_are_not(tmp_path):
  loaded = tiny(tmp_path)
  with np.load(tmp_path / 'data.npz') as stored:
    arrays = dict(stored)
  evaluator_of(builder.build(loaded))
  some = {**arrays, 'test_images': np.concatenate([arrays['train_images'][:4], arrays['test_images'][4:]])}
  np.savez(tmp_path / 'data.npz', **some)
  evaluator_of(builder.build(loaded))
  np.savez(tmp_path / 'data.npz', **{**arrays, 'test_images': arrays['train_images'][:16]})
  assert "data.test_split = 'test': 16 of its 16 images" in refused(loaded)
  refused(tiny(tmp_path, **{'data.test_split': 'train'}))
  evaluator = evaluator_of(builder.build(tiny(tmp_path, **{'data.test_split': 'train', 'data.held_out': 0.25})))
  assert [len(source) for source in evaluator.sources.values()] == [48, 16]


def test_a_share_that_would_have_no_effect_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"data.held_out = 0.1 has no effect, because data.train_split = 'train'"):
    tiny(tmp_path, **{'data.held_out': 0.1})


# Short runs, typed keys


def test_a_run_shorter_than_the_warm_up_has_a_shorter_one(tmp_path):
  def shortened(*overrides, file='configs/quickstart.py'):
    loaded = config.load(file, overrides)
    return builder.shorten_warmup(loaded, *config.changed(file, overrides)), loaded.optimizer.warmup_epochs

  per_epoch = len(resolve.open_split(config.load('configs/quickstart.py'), 'train')) // 64
  said, warmup = shortened('steps=20')  # of 1,000
  steps = round(per_epoch * 20 / 1000)
  assert per_epoch >= 20 and steps >= 1
  assert said == (
    f'optimizer.warmup_epochs = 1 is {per_epoch} steps, but the run has only 20: '
    f'the warm-up is shortened to {warmup:g} epochs (steps: {steps})'
  )
  assert round(warmup * per_epoch) == steps
  assert shortened(file='configs/quickstart.py:steps=20')[1] == warmup
  assert shortened('steps=500') == ('', 1.0)  # longer than the warm-up
  assert shortened('steps=20', 'optimizer.warmup_epochs=1') == ('', 1.0)  # as it was asked for
  assert shortened('seed=1') == ('', 1.0)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--config.tau=0.1'], "config key 'tau' = 0.1 does not exist: did you mean 'temperature.tau'?"),
    (['--config.learning_rate', '0.1'], "did you mean 'optimizer.learning_rate'?"),
    (['--config.stps=4'], "did you mean 'steps'?"),
    (['--config.steps'], "'--config.steps' has no value: give --config.steps=VALUE"),
    (['--config.steps', '--config.seed=1'], "'--config.steps' has no value: give --config.steps=VALUE"),
  ],
)
def test_a_key_that_is_typed_wrong_is_corrected(arguments, message):
  assert message in fails('--config=configs/quickstart.py', '--workdir=w', *arguments)


def test_a_value_may_follow_a_space():
  flags.FLAGS.unparse_flags()
  typed = ['main.py', '--config', 'configs/quickstart.py', '--config.steps', '4', '--config.eval.k=(5,)']
  command = main.parse(flags.FLAGS(typed, known_only=True)[1:])
  assert (command.overrides, command.paths) == (['steps=4', 'eval.k=(5,)'], [])


# Features and sentences


@pytest.mark.slow
def test_features_of_another_encoder_are_evaluated(tmp_path):
  rng = np.random.default_rng(0)
  labels = {'train_labels': np.arange(60) % 3, 'test_labels': np.arange(25) % 3}
  centres = rng.normal(size=(3, 5))
  arrays = {
    f'{split}_features': centres[labels[f'{split}_labels']] + rng.normal(size=(count, 5))
    for split, count in (('train', 60), ('test', 25))
  }
  np.savez(tmp_path / 'mine.npz', **arrays, **labels)
  go(
    '--mode=evaluate',
    '--config=configs/folder.py',
    f'--config.eval.file={tmp_path}/mine.npz',
    f'--workdir={tmp_path}/out',
    '--config.eval.linear=ridge',
  )
  found = json.loads((tmp_path / 'out' / 'evaluation.json').read_text())
  right = knn.accuracy(
    arrays['train_features'], labels['train_labels'], arrays['test_features'], labels['test_labels'], k=(20,), topk=(1,)
  )
  assert found['knn20'] == right['knn20'] and found['knn20'] == round(found['knn20'], 6)


@pytest.mark.slow
def test_sentences_are_counted_as_sentences(tmp_path):
  words = ['red', 'green', 'cats', 'dogs', 'run', 'sleep', 'here', 'there']
  rng = np.random.default_rng(0)
  lines = [' '.join(rng.choice(words, 5)) for _ in range(32)]
  (tmp_path / 'lines.txt').write_text('\n'.join(lines) + '\n')
  (tmp_path / 'sts').mkdir()
  rows = [f'test\t{k % 5}\t{lines[k]}\t{lines[k + 1]}' for k in range(10)]
  (tmp_path / 'sts' / 'stsb.tsv').write_text('\n'.join(rows) + '\n')
  go(
    '--config=configs/sentences.py:small',
    f'--config.data.path={tmp_path}/lines.txt',
    f'--config.eval.sts={tmp_path}/sts',
    f'--workdir={tmp_path}/run',
    '--config.batch_size=8',
    '--config.data.tokens=8',
    '--config.model.width=16',
    '--config.model.depth=1',
    '--config.parallel.devices=1',
    '--config.eval.at_end=True',
    '--config.log.tensorboard=False',
  )
  summary, evaluation = (
    json.loads((tmp_path / 'run' / f'{name}.json').read_text()) for name in ('summary', 'evaluation')
  )
  assert summary['sentences'] == 32 and evaluation['sentences']['train'] == 32
  assert not {'images'} & (summary.keys() | evaluation.keys())
