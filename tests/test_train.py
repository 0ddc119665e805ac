"""The loop as a whole: the same run on any devices, run twice, interrupted and resumed; and what it writes."""

import contextlib
import json

import chex
import jax
import numpy as np
import pytest

from configs import base
from ssl_jax import config, train
from ssl_jax.evals import evaluate
from ssl_jax.run import builder
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

STEPS = 20


def tiny(tmp_path, **changes):
  """A run of seconds: 64 images of 12 pixels, a narrow ResNet, 20 steps over ten epochs."""
  data = tmp_path / 'data.npz'
  if not data.exists():
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 4
    # A colour and a slope for each class, and a little noise: smooth, as images are.
    colours, slopes = rng.uniform(60, 200, (4, 1, 1, 3)), rng.normal(0, 6, (4, 1, 12, 1)) + np.zeros((1, 12, 1, 3))
    images = colours[labels] + slopes[labels] + rng.normal(0, 12, (80, 12, 12, 3))
    images = np.clip(images, 0, 255).astype(np.uint8)
    np.savez(data, train_images=images[:64], train_labels=labels[:64], test_images=images[64:], test_labels=labels[64:])
  chosen = base.get_config()
  settings = {
    'data': dict(source='arrays', name='tiny', path=str(data), image_size=12),
    'augment': dict(name='dystress_cifar', jitter=0.0, grey=0.0),  # colours take long to compile
    'model': dict(name='resnet_tiny', width=8, stage_sizes=(1,)),
    'projector': dict(name='simclr', features=(8, 8)),
    'dtype': 'float32',
    'batch_size': 32,
    'steps': STEPS,
    'optimizer.learning_rate': 0.005,
    'temperature.tau': 0.5,
    'parallel.devices': 1,
    'eval': dict(k=(5,), every_epochs=0, batch_size=40),
    'log': dict(every_steps=1, tensorboard=False),
  }
  for key, value in (settings | changes).items():
    config.override(chosen, key, value)
  config.validate(chosen, base.get_config())
  return chosen


def final(workdir, chosen):
  """(losses of every step, the last state) of a finished run."""
  losses = [row['loss'] for row in metric_log.read(workdir) if 'loss' in row]
  prepared = builder.prepare(chosen)
  checkpoints = Checkpoints(workdir, prepared.identity)
  state = checkpoints.restore(prepared.initial_state())
  checkpoints.close()
  return losses, state


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """The run that the others are compared with: one device, pmap."""
  folder = tmp_path_factory.mktemp('reference')
  chosen = tiny(folder)
  summary = train.train(chosen, folder / 'run')
  return folder, summary, *final(folder / 'run', chosen)


@pytest.mark.parametrize(
  ('kind', 'devices', 'scan'),
  [('pmap', 2, 1), ('pmap', 4, 1), ('shard_map', 1, 1), ('shard_map', 2, 1), ('shard_map', 4, 1), ('pmap', 4, 4)],
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


def test_twice_is_bit_identical(reference, tmp_path):
  _, summary, losses, state = reference
  chosen = tiny(tmp_path)
  again = train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  assert again['knn5'] == summary['knn5']
  chex.assert_trees_all_equal(other, state)


@contextlib.contextmanager
def asked_to_stop_at(step):
  """As a SIGTERM that arrives while the given step runs."""

  class Stop:
    asked = 0

    def is_set(self):
      self.asked += 1
      return self.asked == step

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(train, '_stop_requests', lambda: contextlib.nullcontext(Stop()))
    yield


@pytest.mark.parametrize('stop_at', [1, 7, 19])
def test_interrupted_and_resumed_is_bit_identical(reference, stop_at, tmp_path):
  _, summary, losses, state = reference
  chosen = tiny(tmp_path)
  with (
    asked_to_stop_at(stop_at),
    pytest.raises(train.Interrupted, match=f'stopped at step {stop_at} of {STEPS}; saved'),
  ):
    train.train(chosen, tmp_path / 'run')
  resumed = train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  assert resumed['knn5'] == summary['knn5']
  chex.assert_trees_all_equal(other, state)


def test_a_stop_in_the_last_step_leaves_the_evaluation_to_the_same_command(tmp_path, monkeypatch):
  chosen = tiny(tmp_path, **{'steps': 2, 'eval.at_end': True})
  judged = []
  monkeypatch.setattr(evaluate.Evaluator, 'judge', lambda _, state, workdir: judged.append(int(state.step)))
  stop = type('Stop', (), {'is_set': lambda _: (tmp_path / 'run' / 'summary.json').exists()})()
  with monkeypatch.context() as patched:
    patched.setattr(train, '_stop_requests', lambda: contextlib.nullcontext(stop))
    with pytest.raises(train.Interrupted, match='trained and saved, stopped before the evaluation'):
      train.train(chosen, tmp_path / 'run')
  assert not judged
  summary = (tmp_path / 'run' / 'summary.json').read_text()
  train.train(chosen, tmp_path / 'run')
  assert judged == [2]
  assert (tmp_path / 'run' / 'summary.json').read_text() == summary, 'with the seconds that the training took'
  assert [row['step'] for row in metric_log.read(tmp_path / 'run') if 'loss' in row] == [1, 2]


def test_killed_and_resumed_is_bit_identical(reference, tmp_path, monkeypatch):
  """No time to save: the run goes on from its last checkpoint, and drops the rows that came after it."""
  _, _, losses, state = reference
  chosen = tiny(tmp_path, **{'checkpoint.every_steps': 6})

  class Killed(BaseException):
    pass

  write = metric_log.Records.write

  def die_at_step_9(self, step, row):
    if step == 9:
      raise Killed
    write(self, step, row)

  with monkeypatch.context() as patched:
    patched.setattr(metric_log.Records, 'write', die_at_step_9)
    with pytest.raises(Killed):
      train.train(chosen, tmp_path / 'run')
  with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 9, "los')  # a line cut short
  train.train(chosen, tmp_path / 'run')
  other_losses, other = final(tmp_path / 'run', chosen)
  assert other_losses == losses
  chex.assert_trees_all_equal(other, state)


def test_checkpoints_do_not_cut_the_steps_of_a_dispatch(tmp_path, monkeypatch):
  """Each length would be compiled anew: 4, 3, 1, ... where there are 8 steps an epoch and 4 a dispatch."""
  saved, lengths = [], []
  chosen = tiny(tmp_path, **{'checkpoint.every_steps': 7, 'batch_size': 8, 'parallel.steps_per_call': 4})
  save, calls = Checkpoints.save, train._calls
  monkeypatch.setattr(Checkpoints, 'save', lambda self, state, w: saved.append(int(state.step)) or save(self, state, w))

  def watched(run, step):
    for call, count in calls(run, step):
      lengths.append(count)
      yield call, count

  monkeypatch.setattr(train, '_calls', watched)
  train.train(chosen, tmp_path / 'run')
  assert lengths == [4] * 5 and saved == [8, 16, 20]


def test_a_finished_run_keeps_what_it_was_trained_with(reference, monkeypatch):
  folder, summary, *_ = reference
  monkeypatch.setattr(train, '_machine', lambda run: {'device': 'another', 'jax': '0', 'peak_memory_gib': 9.0})
  train.train(tiny(folder), folder / 'run')
  kept = json.loads((folder / 'run' / 'summary.json').read_text())
  assert {key: kept[key] for key in metric_log.OF_TRAINING[:4]} == {
    key: summary[key] for key in metric_log.OF_TRAINING[:4]
  }


def test_a_finished_run_is_not_trained_again(reference):
  folder, summary, losses, _ = reference
  chosen = tiny(folder)
  again = train.train(chosen, folder / 'run')
  assert again['knn5'] == summary['knn5']
  assert final(folder / 'run', chosen)[0] == losses


def test_what_a_run_leaves_behind(reference):
  folder, summary, losses, _ = reference
  rows = metric_log.read(folder / 'run')
  assert {'step', 'epoch', 'loss', 'tau', 'rate', 'gradient', 'positive', 'images_per_second'} <= rows[0].keys()
  assert rows[0]['tau'] == pytest.approx(0.5)
  assert [row['step'] for row in rows if 'loss' in row] == list(range(1, STEPS + 1))
  assert json.loads((folder / 'run' / 'summary.json').read_text()).keys() == summary.keys()
  assert (summary['steps'], summary['device'], summary['jax']) == (STEPS, '1 x cpu', jax.__version__)
  assert (folder / 'run' / 'neighbours.png').read_bytes().startswith(b'\x89PNG')
  assert losses[-1] < losses[0]


def test_every_row_s_metrics_are_means_of_their_window(reference, tmp_path):
  _, _, losses, _ = reference
  train.train(tiny(tmp_path, **{'log.every_steps': 8}), tmp_path / 'run')
  rows = [row for row in metric_log.read(tmp_path / 'run') if 'loss' in row]
  assert [row['step'] for row in rows] == [8, 16, 20]
  np.testing.assert_allclose(
    [row['loss'] for row in rows], [np.mean(losses[:8]), np.mean(losses[8:16]), np.mean(losses[16:])], rtol=1e-6
  )


def test_a_row_that_an_interruption_cut_in_two_is_whole(reference, tmp_path):
  _, _, losses, _ = reference
  chosen = tiny(tmp_path, **{'log.every_steps': 8})
  with asked_to_stop_at(5), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  train.train(chosen, tmp_path / 'run')
  first = next(row for row in metric_log.read(tmp_path / 'run') if 'loss' in row)
  assert (first['step'], first['loss']) == (8, pytest.approx(np.mean(losses[:8]), rel=1e-6))


def test_a_run_does_not_go_on_with_other_images(tmp_path):
  chosen = tiny(tmp_path)
  with asked_to_stop_at(2), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'run')
  with np.load(tmp_path / 'data.npz') as stored:
    arrays = dict(stored)
  longer = {name: np.concatenate([x, x]) for name, x in arrays.items() if name.startswith('train')}
  np.savez(tmp_path / 'data.npz', **arrays | longer)
  with pytest.raises(ValueError, match=r'is of another config \(data.images = 128 here, 64 there\)'):
    train.train(chosen, tmp_path / 'run')


def test_a_workdir_without_a_checkpoint_is_free(tmp_path):
  with pytest.raises(train.Diverged, match='there is no checkpoint yet'):
    train.train(tiny(tmp_path, **{'optimizer.learning_rate': 1e18}), tmp_path / 'run')
  chosen = tiny(tmp_path, steps=2)
  train.train(chosen, tmp_path / 'run')
  with pytest.raises(ValueError, match=r'holds a run of another config \(seed = 5 here, 0 there\)'):
    train.train(tiny(tmp_path, steps=2, seed=5), tmp_path / 'run')


def test_half_a_checkpoint_is_none(tmp_path):
  (tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp-1').mkdir(parents=True)
  assert not files.saved(tmp_path)


def test_the_last_step_is_saved_before_it_is_judged(tmp_path, monkeypatch):
  def fails(evaluator, state):
    raise ValueError('the test images cannot be read')

  with monkeypatch.context() as patched, pytest.raises(ValueError, match='cannot be read'):
    patched.setattr(evaluate.Evaluator, 'scores', fails)
    train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
  assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['2']
  for _ in range(2):  # the same command judges it, and writes that down once
    summary = train.train(tiny(tmp_path, steps=2), tmp_path / 'run')
    judged = [row for row in metric_log.read(tmp_path / 'run') if 'knn5' in row]
    assert judged == [{'step': 2, 'knn5': summary['knn5']}]


def test_a_checkpoint_of_another_config_is_refused_wherever_it_lies(reference):
  folder, *_ = reference
  prepared = builder.prepare(tiny(folder, **{'temperature.tau': 0.4}))
  checkpoints = Checkpoints(folder / 'run', prepared.identity)
  with pytest.raises(ValueError, match=r'is of another config \(temperature.tau = 0.4 here, 0.5 there\)'):
    checkpoints.restore(prepared.initial_state())
  checkpoints.close()


def test_a_damaged_checkpoint_is_named(tmp_path):
  chosen = tiny(tmp_path, steps=2, **{'eval.k': ()})
  train.train(chosen, tmp_path / 'run')
  for file in (tmp_path / 'run' / 'checkpoints' / '2' / 'state').rglob('*'):
    if file.is_file():
      file.write_bytes(b'')
  with pytest.raises(ValueError, match=r'checkpoint 2 in .* cannot be read .*: remove its folder'):
    train.train(chosen, tmp_path / 'run')


def test_a_workdir_is_one_process_s(tmp_path):
  with files.alone(tmp_path / 'run'):
    message = r'is being trained in by another process: wait, or give another'
    with pytest.raises(ValueError, match=message):
      train.train(tiny(tmp_path), tmp_path / 'run')
    assert not list((tmp_path / 'run').iterdir())
  with files.alone(tmp_path / 'run'):
    pass


def test_a_damaged_line_of_numbers_is_named_and_a_cut_one_is_not_a_row(tmp_path):
  file = tmp_path / 'metrics.jsonl'
  file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
  assert metric_log.read(tmp_path) == [{'step': 1}, {'step': 2}]
  for line in ('{"st', '5', '{"epoch": 1}', '\xff'):
    file.write_bytes(b'{"step": 1}\n' + line.encode('latin-1') + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r'^line 2 of .*metrics.jsonl is no row of numbers by step: mend it'):
      metric_log.read(tmp_path)


def test_a_damaged_config_is_named(tmp_path):
  for text in ('', '[]'):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=r'config.json cannot be read \(.*\): mend it, or remove it'):
      files.read_config(tmp_path)


def test_what_is_left_of_a_run_is_told_at_the_pace_of_the_row(tmp_path, monkeypatch):
  told = []
  monkeypatch.setattr(metric_log.Plain, 'show', lambda self, *given: told.append(given))
  train.train(tiny(tmp_path, steps=4, **{'eval.k': (), 'parallel.steps_per_call': 2}), tmp_path / 'run')
  assert [step for step, *_ in told] == [1, 2, 3, 4]  # two rows a call
  for step, row, left in told:
    assert left == pytest.approx((4 - step) * 32 / row['images_per_second'])


def test_a_run_that_diverges_stops_and_names_the_last_good_checkpoint(tmp_path):
  chosen = tiny(tmp_path, **{'optimizer.learning_rate': 1e18, 'checkpoint.every_steps': 1})
  with pytest.raises(train.Diverged, match=r'not finite at step \d+; the last good checkpoint is step \d'):
    train.train(chosen, tmp_path / 'run')
  prepared = builder.prepare(chosen)
  checkpoints = Checkpoints(tmp_path / 'run', prepared.identity)
  kept = checkpoints.restore(prepared.initial_state())
  checkpoints.close()
  chex.assert_tree_all_finite(kept.params)


def test_host_batches_train_and_resume_like_any_other(tmp_path):
  changes = {'data.on_device': 'no', 'steps': 6, 'eval.k': ()}
  whole, parts = tiny(tmp_path, **changes), tiny(tmp_path, **changes, **{'parallel.devices': 2})
  train.train(whole, tmp_path / 'whole')
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(parts, tmp_path / 'parts')
  train.train(parts, tmp_path / 'parts')
  (losses, state), (other_losses, other) = final(tmp_path / 'whole', whole), final(tmp_path / 'parts', parts)
  np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
  chex.assert_trees_all_close(other.params, state.params, rtol=1e-4, atol=1e-6)


def test_without_labels_training_works_and_knn_says_what_it_needs(tmp_path):
  images = np.random.default_rng(0).integers(0, 256, (32, 12, 12, 3), np.uint8)
  np.savez(tmp_path / 'plain.npz', train_images=images, test_images=images)
  chosen = tiny(tmp_path, **{'data.path': str(tmp_path / 'plain.npz'), 'steps': 2})
  with pytest.raises(ValueError, match=r'has no labels, and kNN needs them: .* --config.eval.k=\(\)'):
    train.train(chosen, tmp_path / 'run')
  config.override(chosen, 'eval.k', ())
  assert train.train(chosen, tmp_path / 'run')['steps'] == 2


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'batch_size': 34, 'parallel.devices': 4}, 'batch_size = 34 does not divide over 4 devices: try 32'),
    ({'parallel.devices': 9}, 'parallel.devices = 9: this machine has 4'),
    ({'batch_size': 128}, 'batch_size = 128 is larger than the 64 training images'),
    ({'eval.k': (65,)}, r'eval.k = \(65,\) has more than the 64 training images'),
    ({'method.name': 'simclrr'}, "method.name = 'simclrr' does not exist: did you mean 'simclr'"),
    ({'method.queue': 5}, "method.queue = 5 is no parameter of 'simclr'"),
    ({'loss.name': 'info_nec'}, "loss.name = 'info_nec' .*did you mean 'info_nce'"),
    ({'loss.name': 'simple'}, "'simple' takes none"),
    ({'temperature.name': 'cosin'}, "temperature.name = 'cosin' .*did you mean 'cosine'"),
    ({'temperature.tau': 0.0}, 'temperature.tau = 0.* above 0'),
    ({'temperature': dict(name='cosine', tau_min=0.5, tau_max=0.2)}, 'temperature.tau_min = 0.5 .*tau_max'),
    ({'model.name': 'resnet81'}, "'resnet81' does not exist: did you mean 'resnet18'"),
    ({'projector.name': 'simclar'}, "'simclar' does not exist: did you mean 'simclr'"),
    ({'augment.name': 'simclar'}, "augment.name = 'simclar' does not exist: did you mean 'simclr'"),
    ({'augment.crop_scale': (1.2, 1)}, 'augment.crop_scale'),
    (
      {'augment.crop': False, 'data.stored_size': 16},
      'data.stored_size = 16 needs random crops: set augment.crop=True',
    ),
    ({'augment.crop': False, 'small_crops.number': 2}, 'small_crops.number = 2 needs random crops: set augment.crop'),
    ({'data.path': 'nowhere.npz'}, "data.path 'nowhere.npz' is not an .npz file"),
    ({'augment.size': 8}, 'augment.size = 8 is not set here: set data.image_size'),
    ({'augment_other': dict(size=8)}, 'augment_other.size = 8 is not set here: set data.image_size'),
    (
      {'imbalance': dict(name='exponential_tail', ratio='a tenth')},
      "imbalance.ratio = 'a tenth' is out of range: give",
    ),
    ({'imbalance': dict(name='exponential_tail', ratio=0.1, n_max=-2)}, 'imbalance.n_max = -2 is out of range: give'),
    ({'imbalance': dict(name='pareto', n_max=8, n_min=9)}, 'imbalance.n_min = 9 is more than n_max = 8'),
    (
      {'imbalance': dict(name='exponential_tail', ratio=0.1), 'batch_size': 16, 'eval.finetune': '5-shot'},
      "eval.finetune: labels: '5-shot', but class . has . training images",
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


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises(ValueError, match='cannot be written'):
    train.train(tiny(tmp_path), tmp_path / 'file' / 'run')
