"""The training loop: dispatch, watch, evaluate, keep, and go on where the last run stopped."""

import collections
import contextlib
import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from ssl_jax.data import pipeline
from ssl_jax.evals.evaluate import evaluator_of
from ssl_jax.run.builder import Run, examples, of_text, prepare
from ssl_jax.run.devices import AXIS
from ssl_jax.run.state import State
from ssl_jax.run.update import make_update, scan_update
from ssl_jax.workdir import files, metric_log
from ssl_jax.workdir.checkpoints import Checkpoints

ASK_EVERY = 10  # single steps after which several processes ask each other whether to stop or to save
IN_FLIGHT = 2  # single steps that are dispatched before the metrics of the first one are read


class Diverged(Exception):
  """The loss or its gradient is no longer a number."""


class Interrupted(Exception):
  """The run was asked to stop, and everything is saved."""


def train(config: ConfigDict, workdir: str) -> dict:
  """Trains the run of `config` in `workdir`, from its last checkpoint if there is one. Returns the summary."""
  start = time.monotonic()
  files.check_unjudged(workdir)
  files.check_own(workdir, config.to_dict())
  run = prepare(config, resumed=files.saved(workdir))
  watched = bool(config.eval.k or run.probe or config.eval.sts)  # on the way
  evaluator = evaluator_of(run) if watched or config.eval.at_end else None
  with contextlib.ExitStack() as stack:
    if not run.on_device:  # batches of workers are in shared memory and in cycles: Python would warn of them at its end
      stack.callback(gc.collect)
    stack.enter_context(files.alone(workdir))
    workdir = files.claim(workdir, config.to_dict())
    checkpoints = Checkpoints(workdir, run.identity, config.checkpoint.keep)
    stack.callback(checkpoints.close)
    state = run.initial_state()
    if checkpoints.latest() is not None:
      state = checkpoints.restore(state)
    first = int(state.step)
    if of_text(config) and jax.process_index() == 0:  # it belongs to the weights
      files.write_text(workdir / 'vocab.txt', '\n'.join(run.train.vocabulary.pieces) + '\n')
    rows = metric_log.Records(workdir, first, config.log.tensorboard)
    stack.callback(rows.close)
    progress = metric_log.progress(first, run.total_steps)
    stack.callback(progress.close)
    progress.say(_opening(run, workdir, first))
    stop = stack.enter_context(_stop_requests())
    state, results = _loop(run, state, evaluator if watched else None, checkpoints, rows, progress, stop)
  summary = {
    **results,
    'images': len(run.train),
    'steps': run.total_steps,
    'seconds': round(time.monotonic() - start, 1),
    'deterministic': config.deterministic,
    **_machine(run),
  }
  if config.data.broken == 'skip':
    met = {run.train, *(evaluator.sources.values() if evaluator else ())}
    summary['broken_images_skipped'] = sum(len(source.skipped) for source in met)
  metric_log.keep(workdir, summary, trained=first < run.total_steps)
  if config.eval.at_end:
    if any(_agreed(run.total_steps, 0, stop.is_set())):  # asked during the last step
      raise Interrupted('trained and saved, stopped before the evaluation: the same command goes on from here')
    evaluator.judge(run.devices.unreplicate(state), workdir)
  metric_log.finish(workdir, summary)
  return summary


def _loop(run: Run, state, evaluator, checkpoints, rows, progress, stop) -> tuple[State, dict]:
  """Steps from `state` to the end; returns the last state, on the devices, and the last evaluation."""
  config, devices = run.config, run.devices
  step, results, saved_at = int(state.step), {}, time.monotonic()
  if evaluator and step == 0 and config.eval.at_start:
    rows.write(0, results := evaluator.at_start(state))
    progress.say(metric_log.sentence('before training', results))
  state = devices.replicate(state)
  watch = Watch(run, rows, progress, checkpoints)
  for call, count in _calls(run, step):
    state, metrics = call(state)
    step += count
    watch.add(step, count, metrics)
    epoch, in_epoch = divmod(step, run.steps_per_epoch)
    last = step == run.total_steps
    every = config.eval.every_epochs
    often = config.checkpoint.every_steps
    steps_due = often and step // often > (step - count) // often
    minutes_due = time.monotonic() - saved_at > 60 * config.checkpoint.every_minutes
    stopping, minutes_due = _agreed(step, count, stop.is_set(), minutes_due)
    if last:  # saved before it is judged, so that nothing is lost if that fails
      watch.drain()
      checkpoints.save(devices.unreplicate(state), watch.window)
    if evaluator and (last or (every and in_epoch == 0 and epoch % every == 0)):
      watch.drain()
      rows.write(step, results := evaluator.scores(state))
      progress.say(metric_log.sentence(f'epoch {step / run.steps_per_epoch:g}', results))
      watch.restart_clock()
    if (steps_due or minutes_due or stopping) and not last:  # after, so that a resumed run has the same rows
      watch.drain()
      checkpoints.save(devices.unreplicate(state), watch.window)
      saved_at = time.monotonic()
      watch.restart_clock()
    if stopping and not last:
      raise Interrupted(f'stopped at step {step} of {run.total_steps}; saved: the same command goes on from here')
  if evaluator and not results:  # the run was complete before
    results = evaluator.scores(state)
    if not any(row['step'] == step and results.keys() <= row.keys() for row in metric_log.read(rows.workdir)):
      rows.write(step, results)  # what judged it then did not come to its end
  if evaluator:
    evaluator.draw_neighbours(rows.workdir / 'neighbours.png')
  return state, results


def _agreed(step: int, count: int, *wishes: bool) -> Sequence[bool]:
  """What any of the processes wishes: all must do the same, so they ask each other; of single steps, now and then."""
  if jax.process_count() == 1:
    return wishes
  if count == 1 and step % ASK_EVERY:
    return (False,) * len(wishes)
  return multihost_utils.process_allgather(np.array(wishes)).any(axis=0).tolist()


def _calls(run: Run, step: int) -> Iterator[tuple[Callable, int]]:
  """(state -> (state, metrics), how many steps it makes), from `step` to the end of the run."""
  config, devices = run.config, run.devices
  settings = dict(seed=config.seed, ema=config.ema, probe=run.probe, axis_name=AXIS)
  update = make_update(run.method, run.optimizer, run.rate, run.augments, **settings)
  if not run.on_device:

    def put(batch):
      run.train.skipped.update(batch['broken'][batch['broken'] >= 0].tolist())  # workers have sources of their own
      return devices.shard((batch['images'], batch['index']))

    one = devices.map(update, replicated=1, sharded=2, donate=(0,))
    with contextlib.closing(run.host_batches(step)) as batches:
      for images, index in pipeline.prefetch(batches, put):
        yield lambda state, images=images, index=index: one(state, images, index), 1
    return
  many = devices.map(scan_update(update), replicated=2, sharded=1, donate=(0,))
  dataset = devices.replicate(run.train.items)
  while step < run.total_steps:
    end = _end_of_call(run, step)
    epoch, place = divmod(step, run.steps_per_epoch)
    order = pipeline.order(config.seed, epoch, len(run.train))
    index = order[place * config.batch_size : (place + end - step) * config.batch_size]
    index = index.reshape(end - step, config.batch_size).T.astype(np.int32)
    index = devices.shard(np.split(index, jax.process_count())[jax.process_index()])
    yield lambda state, index=index: many(state, dataset, index), end - step
    step = end


def _end_of_call(run: Run, step: int) -> int:
  """Calls end on a grid that does not depend on where a run began, so that a resumed run makes the same calls."""
  epoch_start = step - step % run.steps_per_epoch
  length = run.steps_per_call(run.steps_per_epoch)
  end = epoch_start + ((step - epoch_start) // length + 1) * length
  return min(end, epoch_start + run.steps_per_epoch, run.total_steps)


class Watch:
  """Reads metrics a few calls late, so that the device never waits; writes rows; stops a run that diverges."""

  def __init__(self, run: Run, rows, progress, checkpoints):
    self.run, self.rows, self.progress, self.checkpoints = run, rows, progress, checkpoints
    self.pending = collections.deque()
    self.window = checkpoints.unlogged()  # metrics of the steps since the last row
    self.restart_clock()

  def restart_clock(self) -> None:
    """Evaluations and checkpoints do not count as training time."""
    self.read_at, self.timed_steps, self.timed_seconds = time.monotonic(), 0, 0.0

  def add(self, step: int, count: int, metrics) -> None:
    self.pending.append((step, count, metrics))
    # A call of many steps keeps the host busy launching kernels until it is nearly over: then there is nothing to hide.
    while len(self.pending) > (IN_FLIGHT if count == 1 else 0):
      self._read()

  def drain(self) -> None:
    while self.pending:
      self._read()

  def _read(self):
    step, count, metrics = self.pending.popleft()
    metrics = {name: np.atleast_1d(x) for name, x in self.run.devices.unreplicate(metrics).items()}
    finite = np.isfinite(metrics['loss']) & np.isfinite(metrics['gradient'])
    if not finite.all():
      self._diverged(step - count + 1 + int(np.argmin(finite)))
    now = time.monotonic()
    self.timed_steps += count
    self.timed_seconds += now - self.read_at
    self.read_at = now
    every = self.run.config.log.every_steps
    ends = [at for at in range(step - count + 1, step + 1) if at % every == 0 or at == self.run.total_steps]
    rate = self.timed_steps * self.run.config.batch_size / max(self.timed_seconds, 1e-9)
    for i in range(count):
      self.window.append({name: float(x[i]) for name, x in metrics.items()})
      if (at := step - count + 1 + i) in ends:
        self._row(at, rate)
    if ends:
      self.timed_steps, self.timed_seconds = 0, 0.0

  def _row(self, step, rate):
    row = {name: math.fsum(m[name] for m in self.window) / len(self.window) for name in self.window[0]}
    self.window = []
    row |= {'epoch': step / self.run.steps_per_epoch, f'{examples(self.run.config)}_per_second': rate}
    self.rows.write(step, row)
    left = (self.run.total_steps - step) * self.run.config.batch_size / rate
    self.progress.show(step, row, left)

  def _diverged(self, step):
    kept = self.checkpoints.latest()
    good = f'the last good checkpoint is step {kept}' if kept is not None else 'there is no checkpoint yet'
    raise Diverged(
      f'the loss or its gradient is not finite at step {step}; {good}. Lower optimizer.learning_rate, warm it up '
      f'(optimizer.warmup_epochs), raise the temperature, or compute in float32 (dtype)'
    )


@contextlib.contextmanager
def _stop_requests() -> Iterator[threading.Event]:
  """An event that the first SIGINT or SIGTERM sets; a second one interrupts at once."""
  stop = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  previous = {}

  def request(number, frame):
    stop.set()
    print('stops after what is under way, and saves; once more: stops at once', file=sys.stderr, flush=True)
    signal.signal(number, previous[number])

  for number in (signal.SIGINT, signal.SIGTERM):
    previous[number] = signal.signal(number, request)
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _machine(run: Run) -> dict:
  """What a result was made with: the device, the version of jax, and the most memory that a device held at once."""
  device = run.devices.local[0]
  peak = (device.memory_stats() or {}).get('peak_bytes_in_use')  # a CPU does not tell
  return {
    'device': f'{len(run.devices.devices)} x {device.device_kind}',
    'jax': jax.__version__,
    'peak_memory_gib': peak and round(peak / 2**30, 2),
  }


def _opening(run: Run, workdir, first: int) -> str:
  config, kind = run.config, run.devices.devices[0].device_kind
  begin = f'goes on at step {first}' if first else f'starts from {config.init}' if run.start else 'starts'
  return (
    f'{config.method.name}, {config.model.name}, {config.data.name} ({len(run.train):,} {examples(config)}): '
    f'{run.total_steps:,} steps of {config.batch_size} on {len(run.devices.devices)} x {kind}; {begin} in {workdir}'
  )
