"""The training loop: the same run on any devices, repeated, interrupted and resumed; and the files it writes."""

import contextlib
import errno
import json
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
from PIL import Image

from configs import base
from ssl_jax import config, train
from ssl_jax.data import pipeline
from ssl_jax.evals import evaluate
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.run import builder
from ssl_jax.workdir import files, metric_log, progress
from ssl_jax.workdir.checkpoints import Checkpoints
from tests.helpers import STEPS, asked_to_stop_at, final, tiny

DIVERGES = {'optimizer.learning_rate': 1e6, 'optimizer.weight_decay': 1e6}
METRICS = {
  *('step', 'epoch', 'loss', 'learning_rate', 'grad_norm', 'positive_similarity', 'temperature'),
  'images_per_second',
}


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """The run that others are compared with: one device, pmap."""
  folder = tmp_path_factory.mktemp('reference')
  chosen = tiny(folder)
  summary = train.train(chosen, folder / 'run')
  return folder, summary, *final(folder / 'run', chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'devices', 'scan'),
  [
    *[('pmap', 2, 1), ('pmap', 4, 1), ('pmap', 4, 4)],
    *[('shard_map', 1, 1), ('shard_map', 2, 1), ('shard_map', 4, 1)],
  ],
)
def test_the_same_curve_on_any_devices(reference, kind, devices, scan, tmp_path):
  _, _, losses, state = reference
  chosen = tiny(tmp_path, parallel=dict(map=kind, devices=devices, steps_per_call=scan), **{'eval.k': ()})
  train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert len(losses) == STEPS
  np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
  chex.assert_trees_all_close(other.params, state.params, rtol=1e-4, atol=1e-6)
  chex.assert_trees_all_close(other.batch_stats, state.batch_stats, rtol=1e-4, atol=1e-6)


def test_repeated_run_is_bit_identical(reference, tmp_path):
  _, summary, losses, state = reference
  chosen = tiny(tmp_path)
  again = train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  assert again['knn5'] == summary['knn5']
  chex.assert_trees_all_equal(other, state)


@pytest.mark.parametrize('stop_at', [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 19))])
def test_interrupted_and_resumed_is_bit_identical(reference, stop_at, tmp_path):
  _, summary, losses, state = reference
  chosen = tiny(tmp_path)
  with (
    asked_to_stop_at(stop_at),
    pytest.raises(train.Interrupted, match=f'stopped at step {stop_at} of {STEPS} and saved'),
  ):
    train.train(chosen, tmp_path / 'run')
  resumed = train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  assert resumed['knn5'] == summary['knn5']
  chex.assert_trees_all_equal(other, state)


@pytest.mark.slow
def test_a_stop_in_the_last_step_leaves_the_evaluation_to_the_next_call(tmp_path, monkeypatch):
  chosen = tiny(tmp_path, **{'steps': 2, 'eval.at_end': True})
  evaluated = []
  monkeypatch.setattr(ImageEvaluator, 'evaluate', lambda _, state, workdir: evaluated.append(int(state.step)))
  stop = type('Stop', (), {'is_set': lambda _: (tmp_path / 'run' / 'summary.json').exists()})()
  with monkeypatch.context() as patched:
    patched.setattr(train, '_stop_requests', lambda: contextlib.nullcontext(stop))
    with pytest.raises(train.Interrupted, match='trained and saved, stopped before the evaluation'):
      train.train(chosen, tmp_path / 'run')
  assert not evaluated
  summary = (tmp_path / 'run' / 'summary.json').read_text()
  train.train(chosen, tmp_path / 'run')
  assert evaluated == [2]
  assert (tmp_path / 'run' / 'summary.json').read_text() == summary, 'including the seconds of the training'
  assert [row['step'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row] == [1, 2]


def test_a_stop_during_an_evaluation_ends_the_run_there(tmp_path, monkeypatch):
  def scores(self, state):
    if not metric_log.read(tmp_path / 'run')[2:]:  # the first evaluation, after two steps
      signal.raise_signal(signal.SIGTERM)
    return {'knn5': 50.0}

  monkeypatch.setattr(ImageEvaluator, 'scores', scores)
  chosen = tiny(tmp_path, **{'steps': 6, 'eval.every_epochs': 1, 'parallel.steps_per_call': 2})
  with pytest.raises(train.Interrupted, match='stopped at step 2 of 6 and saved'):
    train.train(chosen, tmp_path / 'run')
  assert [row['step'] for row in metric_log.read(tmp_path / 'run') if 'knn5' in row] == [2]


def test_a_signal_does_not_interrupt_the_last_checkpoint(tmp_path, monkeypatch):
  wait, handlers = Checkpoints.wait, []
  monkeypatch.setattr(Checkpoints, 'wait', lambda self: handlers.append(signal.getsignal(signal.SIGINT)) or wait(self))
  train.train(tiny(tmp_path, **{'steps': 2, 'eval.k': ()}), tmp_path / 'run')
  assert handlers[0] is not signal.getsignal(signal.SIGINT)


def test_images_skipped_before_an_interruption_are_counted(tmp_path):
  (tmp_path / 'train').mkdir()
  for k in range(16):
    Image.new('RGB', (12, 12), (16 * k, 0, 0)).save(tmp_path / f'train/{k:02}.png')
  first = pipeline.order(0, 0, 16)[0]
  (tmp_path / f'train/{first:02}.png').write_bytes(b'nothing')
  data = dict(source='folder', path=str(tmp_path), broken='skip', on_device='no')
  chosen = tiny(tmp_path, data=data, **{'batch_size': 4, 'steps': 4, 'eval.k': ()})
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  assert train.train(chosen, tmp_path / 'run')['broken_images_skipped'] == 1


def test_killed_and_resumed_is_bit_identical(reference, tmp_path, monkeypatch):
  """The run resumes from its last checkpoint and drops the rows that came after it."""
  _, _, losses, state = reference
  chosen = tiny(tmp_path, **{'checkpoint.every_steps': 6})

  class Killed(BaseException):
    pass

  write = metric_log.MetricLog.write

  def die_at_step_9(self, step, row):
    if step == 9:
      raise Killed
    write(self, step, row)

  with monkeypatch.context() as patched:
    patched.setattr(metric_log.MetricLog, 'write', die_at_step_9)
    with pytest.raises(Killed):
      train.train(chosen, tmp_path / 'run')
  with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 9, "los')  # a line cut short
  train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  chex.assert_trees_all_equal(other, state)


@pytest.mark.slow
def test_checkpoints_do_not_split_calls(tmp_path, monkeypatch):
  """Each length is compiled separately: with 8 steps per epoch and 4 per call, 4, 3, 1, ... would be three programs."""
  saved, lengths = [], []
  chosen = tiny(tmp_path, **{'checkpoint.every_steps': 7, 'batch_size': 8, 'parallel.steps_per_call': 4})
  save, calls = Checkpoints.save, train._calls
  monkeypatch.setattr(
    Checkpoints, 'save', lambda self, state, *rest: saved.append(int(state.step)) or save(self, state, *rest)
  )

  def watched(run, step):
    for call, count in calls(run, step):
      lengths.append(count)
      yield call, count

  monkeypatch.setattr(train, '_calls', watched)
  train.train(chosen, tmp_path / 'run')
  assert lengths == [4] * 5 and saved == [8, 16, 20]


def test_a_finished_run_keeps_the_machine_it_was_trained_on(reference, monkeypatch):
  folder, summary, *_ = reference
  monkeypatch.setattr(train, '_machine', lambda run: {'device': 'another', 'jax': '0', 'peak_memory_gib': 9.0})
  train.train(tiny(folder), folder / 'run')
  kept = json.loads((folder / 'run' / 'summary.json').read_text())
  assert {key: kept[key] for key in metric_log.TRAINING_KEYS[:4]} == {
    key: summary[key] for key in metric_log.TRAINING_KEYS[:4]
  }


def test_a_finished_run_is_not_trained_again(reference):
  folder, summary, losses, _ = reference
  chosen = tiny(folder)
  again = train.train(chosen, folder / 'run')
  assert again['knn5'] == summary['knn5']
  assert final(folder / 'run', chosen)[0] == losses


def test_the_files_of_a_finished_run(reference):
  folder, summary, losses, _ = reference
  rows = metric_log.read(folder / 'run')
  assert rows[0].keys() >= METRICS
  assert rows[0]['temperature'] == pytest.approx(0.5)
  assert [row['step'] for row in rows if 'loss' in row] == list(range(1, STEPS + 1))
  assert json.loads((folder / 'run' / 'summary.json').read_text()).keys() == summary.keys()
  assert (summary['steps'], summary['device'], summary['jax']) == (STEPS, '1 x cpu', jax.__version__)
  assert (folder / 'run' / 'neighbors.png').read_bytes().startswith(b'\x89PNG')
  assert losses[-1] < losses[0]


def test_a_row_is_the_mean_of_the_steps_since_the_last(reference, tmp_path):
  _, _, losses, _ = reference
  train.train(tiny(tmp_path, **{'log.every_steps': 8}), tmp_path / 'run')
  rows = [row for row in metric_log.read(tmp_path / 'run') if 'loss' in row]
  assert [row['step'] for row in rows] == [8, 16, 20]
  np.testing.assert_allclose(
    [row['loss'] for row in rows], [np.mean(losses[:8]), np.mean(losses[8:16]), np.mean(losses[16:])], rtol=1e-6
  )


def test_an_interruption_does_not_split_a_row(reference, tmp_path):
  _, _, losses, _ = reference
  chosen = tiny(tmp_path, **{'log.every_steps': 8})
  with asked_to_stop_at(5), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  train.train(chosen, tmp_path / 'run')
  first = next(row for row in metric_log.read(tmp_path / 'run') if 'loss' in row)
  assert (first['step'], first['loss']) == (8, pytest.approx(np.mean(losses[:8]), rel=1e-6))


def test_a_run_does_not_resume_with_other_images(tmp_path):
  chosen = tiny(tmp_path)
  with asked_to_stop_at(2), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  with np.load(tmp_path / 'data.npz') as stored:
    arrays = dict(stored)
  longer = {name: np.concatenate([x, x]) for name, x in arrays.items() if name.startswith('train')}
  np.savez(tmp_path / 'data.npz', **arrays | longer)
  with pytest.raises(ValueError, match=r'holds a run of another config \(data.images = 128 here, 64 there\)'):
    train.train(chosen, tmp_path / 'run')


@pytest.mark.slow
def test_a_workdir_without_a_checkpoint_is_free(tmp_path):
  with pytest.raises(train.Diverged, match='there is no checkpoint yet'):
    train.train(tiny(tmp_path, **DIVERGES), tmp_path / 'run')
  chosen = tiny(tmp_path, steps=2)
  train.train(chosen, tmp_path / 'run')
  with pytest.raises(ValueError, match=r'holds a run of another config \(seed = 5 here, 0 there\)'):
    train.train(tiny(tmp_path, steps=2, seed=5), tmp_path / 'run')


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
  (tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp-1').mkdir(parents=True)
  assert not files.saved(tmp_path)


@pytest.mark.slow
def test_the_last_step_is_saved_before_it_is_evaluated(tmp_path, monkeypatch):
  def fails(evaluator, state):
    raise ValueError('the test images cannot be read')

  with monkeypatch.context() as patched, pytest.raises(ValueError, match='cannot be read'):
    patched.setattr(ImageEvaluator, 'scores', fails)
    train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
  assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['2']
  for _ in range(2):  # the same command evaluates it, and logs that once
    summary = train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
    rows = [row for row in metric_log.read(tmp_path / 'run') if 'knn5' in row]
    assert rows == [{'step': 2, 'knn5': summary['knn5']}]
  summary = train.train(tiny(tmp_path, steps=2, **{'eval.flip': True}), tmp_path / 'run')
  newest = {k: v for row in metric_log.read(tmp_path / 'run') for k, v in row.items()}
  assert newest['knn5'] == summary['knn5']


@pytest.mark.parametrize('found', [{}, {'images': 64}])
def test_the_checkpoint_decides_who_owns_a_workdir(reference, tmp_path, found):
  folder, *_ = reference
  shutil.copytree(folder / 'run' / 'checkpoints', tmp_path / 'run' / 'checkpoints')
  identity = lambda **changes: tiny(folder, **changes).to_dict()
  same, other = identity(), identity(**{'temperature.tau': 0.4})
  same['data'] |= found  # unknown before the data is loaded
  assert files.check(tmp_path / 'run', same) == tmp_path / 'run'
  with pytest.raises(ValueError, match=r'holds a run of another config \(temperature.tau = 0.4 here, 0.5 there\)'):
    files.check(tmp_path / 'run', {**other, 'data': same['data']})


def test_a_workdir_with_an_evaluation_of_other_weights_is_not_trained_in(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'evaluation.json').write_text('{}')
  assert files.check(tmp_path / 'run', tiny(tmp_path).to_dict()) == tmp_path / 'run'
  with pytest.raises(ValueError, match=r'holds an evaluation of other weights \(evaluation.json\): give another'):
    train.train(tiny(tmp_path), tmp_path / 'run')


def test_a_damaged_checkpoint_without_checksums_is_named(tmp_path):
  chosen = tiny(tmp_path, steps=2, **{'eval.k': ()})
  train.train(chosen, tmp_path / 'run')
  (tmp_path / 'run' / 'checkpoints' / '2' / 'checksums.json').unlink()
  for file in (tmp_path / 'run' / 'checkpoints' / '2' / 'state').rglob('*'):
    if file.is_file():
      file.write_bytes(b'')
  with pytest.raises(ValueError, match=r'checkpoint 2 in .* cannot be read .*: remove its folder, and the run starts'):
    train.train(chosen, tmp_path / 'run')


def test_a_workdir_that_the_locale_cannot_encode_is_refused_at_once(tmp_path):
  with pytest.raises(ValueError, match=r"^--workdir='.*' has letters that this locale lacks: set PYTHONUTF8=1$"):
    files.writable(tmp_path / os.fsdecode(b'\xff'))


def test_only_one_process_trains_in_a_workdir(tmp_path):
  with files.locked(tmp_path / 'run'):
    message = 'is in use by another training process: wait for it, or give another directory'
    with pytest.raises(ValueError, match=message):
      train.train(tiny(tmp_path), tmp_path / 'run')
    assert not list((tmp_path / 'run').iterdir())
  with files.locked(tmp_path / 'run'):
    pass


def test_a_second_training_process_is_refused_before_the_data_is_read(tmp_path):
  chosen = tiny(tmp_path)
  (tmp_path / 'data.npz').unlink()
  with files.locked(tmp_path / 'run'), pytest.raises(ValueError, match='is in use by another training process'):
    train.train(chosen, tmp_path / 'run')


@pytest.mark.parametrize('exists', [False, True])
def test_a_workdir_is_locked_from_the_read_of_the_data_or_its_creation_to_the_end(tmp_path, monkeypatch, exists):
  class Stop(Exception):
    pass

  def require_lock():
    with pytest.raises(ValueError, match='in use by another training process'), files.locked(tmp_path / 'run'):
      pass

  def build(*given, original=train.builder.build, **named):
    if exists:
      require_lock()
    return original(*given, **named)

  def run_from(loop, state):
    require_lock()
    raise Stop

  if exists:
    (tmp_path / 'run').mkdir()
  monkeypatch.setattr(train.builder, 'build', build)
  monkeypatch.setattr(train.Loop, 'run_from', run_from)
  with pytest.raises(Stop):
    train.train(tiny(tmp_path), tmp_path / 'run')
  with files.locked(tmp_path / 'run'):
    pass


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(files.fcntl, 'flock', flock)
  with files.locked(tmp_path / 'run'):
    files.write_text(tmp_path / 'run' / 'summary.json', '{}')
  assert files.read_json(tmp_path / 'run' / 'summary.json') == {}


def test_a_damaged_row_is_named_and_a_cut_last_one_is_dropped(tmp_path):
  file = tmp_path / 'metrics.jsonl'
  file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
  assert metric_log.read(tmp_path) == [{'step': 1}, {'step': 2}]
  for line in ('{"st', '5', '{"epoch": 1}', '\xff'):
    file.write_bytes(b'{"step": 1}\n' + line.encode('latin-1') + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r'^line 2 of .*metrics.jsonl has no metrics of a step: fix it'):
      metric_log.read(tmp_path)


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
  """They can be followed during a run, and a kill loses none of them."""
  log = metric_log.MetricLog(tmp_path, 0, tensorboard=False)
  for step in (1, 2):
    log.write(step, {'loss': 3.0})
    assert metric_log.read(tmp_path)[-1] == {'step': step, 'loss': 3.0}
  log.close()


def test_a_run_that_starts_again_drops_all_rows(tmp_path):
  """Otherwise, a report shows the accuracy before training of a run that was killed before its first checkpoint."""
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "knn5": 25.0}\n{"step": 1, "loss": 3.0}\n')
  metric_log.MetricLog(tmp_path, 0, tensorboard=False).close()
  assert metric_log.read(tmp_path) == []


def test_the_metrics_of_older_runs_are_read_under_their_present_names(tmp_path):
  old = {'step': 1, 'loss': 4.0, 'rate': 0.1, 'gradient': 2.0, 'positive': 0.5, 'tau': 0.2}
  old |= {'probe_loss': 1.5, 'probe_train': 40.0, 'probe': 41.0, 'backbone/tolerance': 0.3}
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(old) + '\n')
  expected = {'step': 1, 'loss': 4.0, 'learning_rate': 0.1, 'grad_norm': 2.0, 'positive_similarity': 0.5}
  expected |= {'temperature': 0.2, 'online_probe_loss': 1.5, 'online_probe_train': 40.0, 'online_probe': 41.0}
  assert metric_log.read(tmp_path) == [expected | {'backbone/tolerance': 0.3}]


@pytest.mark.slow
def test_an_older_run_resumes_within_a_row(tmp_path, monkeypatch):
  """The steps since the last row are in the checkpoint, with the metrics under their old names."""
  chosen = tiny(tmp_path, steps=4, **{'log.every_steps': 4, 'eval.k': ()})
  with asked_to_stop_at(2), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  old_names = {new: old for old, new in metric_log.RENAMED.items()}
  unlogged = Checkpoints.unlogged
  monkeypatch.setattr(
    Checkpoints, 'unlogged', lambda self: [{old_names.get(k, k): x for k, x in m.items()} for m in unlogged(self)]
  )
  train.train(chosen, tmp_path / 'run')
  (row,) = metric_log.read(tmp_path / 'run')
  assert row['step'] == 4 and row.keys() >= METRICS


@pytest.mark.slow
def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path, monkeypatch):
  chosen = tiny(tmp_path, steps=4, **{'eval.k': ()})
  save = Checkpoints.save
  with monkeypatch.context() as patched, asked_to_stop_at(2), pytest.raises(train.Interrupted):
    longer = lambda self, state, window, seconds, *rest: save(self, state, window, 1000 + seconds, *rest)
    patched.setattr(Checkpoints, 'save', longer)
    train.train(chosen, tmp_path / 'run')
  assert 1000 < train.train(chosen, tmp_path / 'run')['seconds'] < 2000


def test_a_damaged_config_is_named(tmp_path):
  for text in ('', '[]'):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=r'config.json cannot be read \(.*\): fix it, or remove it'):
      files.read_config(tmp_path)


def test_the_remaining_time_follows_from_the_last_row(tmp_path, monkeypatch):
  shown = []
  monkeypatch.setattr(progress.Plain, 'show', lambda self, *given: shown.append(given))
  train.train(tiny(tmp_path, steps=5, **{'eval.k': (), 'parallel.steps_per_call': 2}), tmp_path / 'run')
  assert [step for step, *_ in shown] == [1, 2, 3, 4, 5]  # two rows per call, and one of a shorter call
  for _, row, left in (*shown[:2], shown[4]):  # compilation and the first call of a length cannot be told apart
    assert left is None and 'images_per_second' not in row
  for step, row, left in shown[2:4]:
    assert left == pytest.approx((5 - step) * 32 / row['images_per_second'])


def test_the_difference_that_explains_most_is_named():
  data = {'images': 2, 'contents': 'a', 'sizes': 'x'}
  of = lambda **changes: files.difference_of({'data': data}, {'data': {**data, **changes}})
  assert of() is None
  assert of(sizes='y').startswith('data.sizes =')
  assert of(sizes='y', contents='b').startswith('data.contents =')
  assert of(sizes='y', contents='b', images=3).startswith('data.images =')
  old = {'data': {'images': 2, 'contents': 'a'}}  # of an earlier version
  assert files.difference_of(old, {'data': data}) is None


def test_other_images_of_the_same_number_are_another_run(tmp_path):
  chosen = tiny(tmp_path, steps=2)
  train.train(chosen, tmp_path / 'run')
  with np.load(tmp_path / 'data.npz') as found:
    arrays = dict(found)
  np.savez(tmp_path / 'moved.npz', **arrays)
  chosen.data.path = str(tmp_path / 'moved.npz')
  train.train(chosen, tmp_path / 'run')  # the same images in another place
  arrays['train_images'] = 255 - arrays['train_images']
  np.savez(tmp_path / 'data.npz', **arrays)
  with pytest.raises(
    ValueError, match=r"holds a run of another config \(data.contents = '\w{8}' here, '\w{8}' there\)"
  ):
    train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
  old = {**chosen.to_dict(), 'data': {**chosen.data.to_dict(), 'images': 64}}  # of an earlier version
  assert files.difference_of(old, builder.build(tiny(tmp_path, steps=2)).identity) is None


def test_results_without_checkpoints_are_not_overwritten_by_another_config(tmp_path):
  train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'checkpoints')
  with pytest.raises(ValueError, match=r'holds the results of another config \(seed = 5 here, 0 there\)'):
    train.train(tiny(tmp_path, steps=2, seed=5), tmp_path / 'run')
  file = tmp_path / 'run' / 'summary.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'device': 'another'}))
  trained = train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
  assert json.loads(file.read_text())['device'] == trained['device'] != 'another'


def test_a_workdir_among_the_images_is_refused(tmp_path):
  (tmp_path / 'images' / 'a').mkdir(parents=True)
  chosen = base.get_config()
  chosen.data.update(source='folder', path=str(tmp_path / 'images'), train_split='', test_split='')
  with pytest.raises(ValueError, match=r"--workdir='.*out' is in the image folder .*images: give another directory"):
    train.train(chosen, str(tmp_path / 'images' / 'out'))


def test_milestones_in_the_warm_up_and_after_the_end_are_named(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(progress.Plain, 'say', lambda self, text: said.append(text))
  changes = {'optimizer.schedule': 'step', 'optimizer.milestones': (0.25, 0.5, 1.0, 9.5), 'steps': 2, 'eval.k': ()}
  changes |= {'optimizer.warmup_epochs': 0.5}
  train.train(tiny(tmp_path, **changes), tmp_path / 'run')
  late = 'the run ends at epoch 1: the learning rate does not drop at 1, 9.5 (optimizer.milestones)'
  early = 'the warm-up ends at epoch 0.5: the learning rate drops then, not at 0.25 (optimizer.milestones)'
  assert said.count(early) == said.count(late) == 1


def test_a_run_that_diverges_stops_and_names_the_last_good_checkpoint(tmp_path):
  chosen = tiny(tmp_path, **{**DIVERGES, 'checkpoint.every_steps': 1})
  with pytest.raises(train.Diverged, match=r'not finite at step \d+; the last good checkpoint is step \d'):
    train.train(chosen, tmp_path / 'run')
  checkpoints = Checkpoints(tmp_path / 'run')
  chex.assert_tree_all_finite(checkpoints.newest().params)
  checkpoints.close()


@pytest.mark.slow
def test_host_batches_train_and_resume(tmp_path):
  changes = {'data.on_device': 'no', 'steps': 6, 'eval.k': ()}
  whole, parts = tiny(tmp_path, **changes), tiny(tmp_path, **changes, **{'parallel.devices': 2})
  train.train(whole, tmp_path / 'whole')
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(parts, tmp_path / 'parts')
  train.train(parts, tmp_path / 'parts')
  (losses, state), (other_losses, other) = final(tmp_path / 'whole', whole), final(tmp_path / 'parts', parts)
  np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
  chex.assert_trees_all_close(other.params, state.params, rtol=1e-4, atol=1e-6)


def test_without_labels_only_knn_is_refused(tmp_path):
  images = np.random.default_rng(0).integers(0, 256, (32, 12, 12, 3), np.uint8)
  np.savez(tmp_path / 'plain.npz', train_images=images, test_images=images)
  chosen = tiny(tmp_path, **{'data.path': str(tmp_path / 'plain.npz'), 'steps': 2})
  with pytest.raises(ValueError, match=r'has no labels, and evaluations need them: .*--config.eval.k=\(\)'):
    train.train(chosen, tmp_path / 'run')
  config.override(chosen, 'eval.k', ())
  assert train.train(chosen, tmp_path / 'run')['steps'] == 2


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'batch_size': 34, 'parallel.devices': 4}, 'batch_size = 34 must be divisible by the 4 devices: try 32'),
    ({'parallel.devices': 9}, 'parallel.devices = 9 must be at most 4'),
    ({'batch_size': 128}, 'batch_size = 128 must not exceed the 64 training images'),
    ({'eval.k': (65,)}, r'eval.k = \(65,\) must not exceed the 64 training images'),
    ({'method.name': 'simclrr'}, "method.name = 'simclrr' is not a known method: did you mean 'simclr'"),
    ({'method.queue': 5}, "method.queue = 5 is not a parameter of 'simclr'"),
    ({'loss.name': 'info_nec'}, "loss.name = 'info_nec' .*did you mean 'info_nce'"),
    ({'loss.name': 'simple'}, "'simple' takes no temperature"),
    ({'temperature.name': 'cosin'}, "temperature.name = 'cosin' .*did you mean 'cosine'"),
    ({'temperature.tau': 0.0}, 'temperature.tau = 0.0 must be positive'),
    ({'temperature': dict(name='cosine', tau_min=0.5, tau_max=0.2)}, 'temperature.tau_min = 0.5 .*tau_max'),
    ({'model.name': 'resnet81'}, "model.name = 'resnet81' is not a known model: did you mean 'resnet18'"),
    ({'projector.name': 'simclar'}, "projector.name = 'simclar' is not a known projector: did you mean 'simclr'"),
    ({'augment.name': 'simclar'}, "augment.name = 'simclar' is not a valid choice: did you mean 'simclr'"),
    ({'augment.crop_scale': (1.2, 1)}, 'augment.crop_scale'),
    (
      {'augment.crop': False, 'data.stored_size': 16},
      'data.stored_size = 16 needs random crops: set augment.crop=True',
    ),
    ({'augment.crop': False, 'small_crops.number': 2}, 'small_crops.number = 2 needs random crops: set augment.crop'),
    ({'data.path': 'nowhere.npz'}, "data.path = 'nowhere.npz' must be an .npz file"),
    ({'augment.size': 13}, 'augment.size = 13 must be at most data.image_size = 12'),
    ({'augment.size': 8, 'augment.crop': False}, 'augment.size = 8 needs random crops: set augment.crop=True'),
    ({'augment_other': dict(size=8)}, 'augment_other.size = 8 cannot be set: all views have augment.size'),
    (
      {'imbalance': dict(name='exponential_tail', ratio='a tenth')},
      "imbalance.ratio = 'a tenth' must be the size of the last class",
    ),
    (
      {'imbalance': dict(name='exponential_tail', ratio=0.1, n_max=-2)},
      'imbalance.n_max = -2 must be the size of the largest class, at least 1',
    ),
    ({'imbalance': dict(name='pareto', n_max=8, n_min=9)}, 'imbalance.n_min = 9 must be at most n_max = 8'),
    (
      {'imbalance': dict(name='exponential_tail', ratio=0.1), 'batch_size': 16, 'eval.finetune': '5-shot'},
      "eval.finetune: labels = '5-shot' is more than the . training images of class .",
    ),
  ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    train.train(tiny(tmp_path, **changes), tmp_path / 'run')
  assert '\n' not in str(error.value)
  assert not (tmp_path / 'run').exists(), 'a refused config leaves nothing behind'


def test_a_workdir_of_another_config_is_refused(reference):
  folder, *_ = reference
  other = tiny(folder, **{'optimizer.learning_rate': 0.5})
  with pytest.raises(ValueError, match=r'of another config \(optimizer.learning_rate = 0.5 here, 0.005 there\)'):
    train.train(other, folder / 'run')


@pytest.mark.parametrize('run', [train.train, evaluate.evaluate])
def test_a_workdir_that_cannot_be_written_is_refused_before_the_data_is_read(tmp_path, run, monkeypatch):
  (tmp_path / 'file').write_text('in the way')
  chosen = tiny(tmp_path, init='random')
  (tmp_path / 'data.npz').unlink()
  with pytest.raises(ValueError, match='cannot be written'):
    run(chosen, tmp_path / 'file' / 'run')
  with monkeypatch.context() as patched, pytest.raises(OSError, match='No space left') as error:
    patched.setattr(files.tempfile, 'TemporaryFile', lambda dir: open('/dev/full', 'wb'))  # noqa: SIM115
    run(chosen, tmp_path / 'run')
  assert error.value.filename == str(tmp_path / 'run') and not (tmp_path / 'run').exists()
