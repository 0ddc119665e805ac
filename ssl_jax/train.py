"""The training loop: dispatch steps, log metrics, evaluate, save, and resume."""

import collections
import contextlib
import dataclasses
import gc
import math
import pathlib
import shlex
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from ssl_jax.data import pipeline, resolve
from ssl_jax.evals import settings as eval_settings
from ssl_jax.evals.evaluate import Evaluator, evaluator_of
from ssl_jax.reporting import neighbors
from ssl_jax.run import builder
from ssl_jax.run.builder import Run
from ssl_jax.run.devices import AXIS, compile_seconds, require_same, shares
from ssl_jax.run.state import State
from ssl_jax.run.update import make_update, scan_update
from ssl_jax.workdir import files, fork, metric_log, progress, wandb_log
from ssl_jax.workdir.checkpoints import Checkpoints

AGREE_EVERY = 10  # single-step calls between the points at which processes agree to stop or to save
IN_FLIGHT = 2  # single-step calls that may be pending before the metrics of the first are read

Call = Callable[[State], tuple[State, dict[str, jax.Array]]]  # a dispatch of one or more steps


class Diverged(Exception):
  """The loss or its gradient is not finite."""


class Interrupted(Exception):
  """The run was asked to stop, and its state is saved."""


def train(config: ConfigDict, workdir: str) -> dict:
  """Trains the run of `config` in `workdir`, from the last checkpoint if there is one. Returns the summary."""
  start, compiled = time.monotonic(), compile_seconds()
  eval_settings.check(config.eval)
  if config.log.wandb:
    wandb_log.require_package(config.log.wandb)
  parent = fork.parent_of(config, workdir)
  _require_outside(config, workdir)
  exists = files.writable(workdir, create=False).is_dir()
  with contextlib.ExitStack() as stack:
    if parent:
      stack.callback(parent.close)
    if exists:  # another training process is noticed before the data is read
      stack.enter_context(files.locked(workdir))
    run = builder.build(config, resumed=files.saved(workdir) or parent is not None)
    _require_same_examples(run)
    during = run.modality.evaluates(config)
    evaluator = evaluator_of(run) if during or config.eval.at_end else None
    state = run.initial_state()
    if not run.on_device:  # worker batches hold shared memory in reference cycles; otherwise Python warns at exit
      stack.callback(gc.collect)
    if parent:
      parent.check(run, state)
    if not exists:  # a refused config leaves no folder behind
      stack.enter_context(files.locked(workdir))
    identity = run.identity  # reads the names of images
    workdir = files.check(workdir, identity, trains=True)
    files.claim(workdir, config.to_dict())
    checkpoints = Checkpoints(workdir, identity, config.checkpoint.keep, keep_every=config.checkpoint.keep_every)
    stack.callback(checkpoints.close)
    if parent:
      parent.hand_over(checkpoints, workdir, state)
    latest = checkpoints.latest()
    _require_shared(workdir, latest)
    if latest is not None:
      state = checkpoints.restore(state)
    first, skipped = int(state.step), checkpoints.skipped()
    start -= checkpoints.seconds()  # the start of an uninterrupted run
    if jax.process_index() == 0:
      for name, text in run.modality.files(run.train).items():
        files.write_text(workdir / name, text)
    logged = first - len(checkpoints.unlogged())
    log = metric_log.MetricLog(workdir, first, config.log.tensorboard, logged, config.log.wandb)
    stack.callback(log.close)
    display = progress.create(first, run.total_steps)
    stack.callback(display.close)
    display.say(_opening(run, workdir, first, forked=parent is not None))
    for message in _displaced(run):
      display.say(message)
    stop = stack.enter_context(_stop_requests())
    stack.callback(checkpoints.wait)  # a signal must not interrupt the write of the last checkpoint
    loop = Loop(run, evaluator if during else None, checkpoints, log, display, stop, start, skipped)
    state, results = loop.run_from(state)
  # The time in the compiler is of this process only, even if the run was resumed.
  times = {'seconds': round(time.monotonic() - start, 1), 'compile_seconds': round(compile_seconds() - compiled, 1)}
  summary = {**results, **_facts(run, evaluator, times, skipped)}
  metric_log.write_summary(workdir, summary, trained=first < run.total_steps)
  if evaluator and config.eval.at_end:
    if any(_agreed(run.total_steps, 0, stop.is_set())):  # a stop was requested during the last step
      raise Interrupted('trained and saved, stopped before the evaluation; the same command resumes here')
    evaluator.evaluate(run.devices.unreplicate(state), workdir)
  progress.finish(workdir, summary)
  return summary


def _facts(run: Run, evaluator: Evaluator | None, times: Mapping[str, float], skipped: Sequence[int]) -> dict:
  """What summary.json says about a run besides its results."""
  config = run.config
  found = {
    run.modality.name: len(run.train),
    'steps': run.total_steps,
    **times,
    'deterministic': config.deterministic,
    **({'fork': config.fork} if config.fork else {}),
    **_machine(run),
  }
  if config.data.broken == 'skip':
    others = {*(evaluator.sources.values() if evaluator else ())} - {run.train}
    found['broken_images_skipped'] = len(_skipped(run, skipped)) + sum(len(source.skipped) for source in others)
  return found


@dataclasses.dataclass
class Loop:
  """Trains a state to the end of the run, and evaluates and saves it whenever that is due."""

  run: Run
  evaluator: Evaluator | None  # None: no evaluations during training
  checkpoints: Checkpoints
  log: metric_log.MetricLog
  display: progress.Plain
  stop: threading.Event
  start: float  # the time.monotonic() at which an uninterrupted run would have started
  skipped: Sequence[int]  # broken training images that were skipped before a resumption

  def run_from(self, state: State) -> tuple[State, dict]:
    """Trains from `state`, a host copy. Returns the final state, on the devices, and the last evaluation results."""
    run, step, results = self.run, int(state.step), {}
    if self.evaluator and step == 0 and run.config.eval.at_start:
      results = self._record(0, 'before training', self.evaluator.at_start(state))
    state = run.devices.replicate(state)
    self.monitor, self.saved_at = Monitor(run, self.log, self.display, self.checkpoints), time.monotonic()
    compiled, begun = set[int](), time.monotonic()  # the lengths of call that are compiled
    if step < run.total_steps:
      self.display.say('compiling the training step ...')
    for call, count in _calls(run, step):
      state, metrics = call(state)
      step += count
      # The first call of a length compiles. A single-step call then returns at once, but a multi-step call returns only
      # when it has nearly finished, so its speed cannot be measured.
      timed = count in compiled or (count == 1 and not compiled)
      if not compiled:
        what = 'compiled' if timed else f'compiled and ran {count} steps'
        self.display.say(f'{what} in {time.monotonic() - begun:.0f} s')
        self.monitor.restart_clock()
      compiled.add(count)
      self.monitor.add(step, count, metrics, timed)
      last = step == run.total_steps
      if last:  # saved before the evaluation, so that nothing is lost if the evaluation fails
        self._save(state)
      if self.evaluator and (last or self._evaluation_due(step)):
        self.monitor.drain()
        results = self._record(step, f'epoch {run.epoch(step):g}', self.evaluator.scores(state))
        self.monitor.restart_clock()
      stopping, save = _agreed(step, count, self.stop.is_set(), self._minutes_due())
      # Saved after the evaluation, so that a resumed run has the row of the evaluation in its metrics.
      if not last and (save or stopping or self._steps_due(step, count)):
        self._save(state)
      if stopping and not last:
        raise Interrupted(f'stopped at step {step} of {run.total_steps} and saved; the same command resumes here')
    if self.evaluator:
      results = results or self._evaluate_finished(state, step)
      neighbors.draw(self.evaluator, self.log.workdir)
    return state, results

  def _evaluation_due(self, step: int) -> bool:
    epoch, step_in_epoch = divmod(step, self.run.steps_per_epoch)
    every = self.run.config.eval.every_epochs
    return bool(every) and step_in_epoch == 0 and epoch % every == 0

  def _steps_due(self, step: int, count: int) -> bool:
    due = self.run.config.checkpoint
    return any(every and step // every > (step - count) // every for every in (due.every_steps, due.keep_every))

  def _minutes_due(self) -> bool:
    return time.monotonic() - self.saved_at > 60 * self.run.config.checkpoint.every_minutes

  def _save(self, state: State) -> None:
    self.monitor.drain()
    host_state = self.run.devices.unreplicate(state)
    seconds = time.monotonic() - self.start
    self.checkpoints.save(host_state, self.monitor.window, seconds, _skipped(self.run, self.skipped))
    self.saved_at = time.monotonic()
    self.monitor.restart_clock()

  def _record(self, step: int, when: str, results: dict) -> dict:
    self.log.write(step, results)
    self.display.say(progress.sentence(when, results))
    return results

  def _evaluate_finished(self, state: State, step: int) -> dict:
    """Evaluates a run that had already finished. Writes the results, unless metrics.jsonl has them."""
    assert self.evaluator is not None
    results = self.evaluator.scores(state)
    if not any(row['step'] == step and results.items() <= row.items() for row in metric_log.read(self.log.workdir)):
      self.log.write(step, results)
    return results


def _agreed(step: int, count: int, *requests: bool) -> Sequence[bool]:
  """For each request, whether any process makes it. Single-step calls communicate only every `AGREE_EVERY` steps."""
  if jax.process_count() == 1:
    return requests
  if count == 1 and step % AGREE_EVERY:
    return (False,) * len(requests)
  return multihost_utils.process_allgather(np.array(requests)).any(axis=0).tolist()


def _skipped(run: Run, before: Sequence[int]) -> list[int]:
  """Positions of the broken training images that any process has skipped, now or `before` a resumption."""
  known = {*before, *run.train.skipped}
  if run.on_device or run.config.data.broken != 'skip' or jax.process_count() == 1:
    return sorted(known)
  found = np.isin(np.arange(len(run.train)), list(known))
  return np.flatnonzero(multihost_utils.process_allgather(found).any(axis=0)).tolist()


def _calls(run: Run, step: int) -> Iterator[tuple[Call, int]]:
  """The calls from `step` to the end of the run, with the number of steps of each."""
  settings = dict(seed=run.config.seed, ema=run.config.ema, online_probe=run.online_probe, axis_name=AXIS)
  update = make_update(run.method, run.optimizer, run.learning_rate, run.views.training, **settings)
  return (_device_calls if run.on_device else _host_calls)(run, update, step)


def _host_calls(run: Run, update: Callable, step: int) -> Iterator[tuple[Call, int]]:
  """One step per call, on batches from host workers."""

  def put(batch):
    # Each worker has its own copy of the source, so the images that workers skipped are recorded here.
    run.train.skipped.update(batch['broken'][batch['broken'] >= 0].tolist())
    return run.devices.shard((batch['images'], batch['index']))

  one = run.devices.map(update, replicated=1, sharded=2, donate=(0,))
  with contextlib.closing(run.host_batches(step)) as batches:
    for images, index in pipeline.prefetch(batches, put):
      call = lambda state, images=images, index=index: one(state, images, index)
      yield call, 1


def _device_calls(run: Run, update: Callable, step: int) -> Iterator[tuple[Call, int]]:
  """Several steps per call, on a dataset that is stored on the devices."""
  batch_size, devices = run.config.batch_size, run.devices
  many = devices.map(scan_update(update), replicated=2, sharded=1, donate=(0,))
  dataset = devices.replicate(run.modality.dataset(run.train))
  while step < run.total_steps:
    end = _end_of_call(run, step)
    epoch, place = divmod(step, run.steps_per_epoch)
    order = pipeline.order(run.config.seed, epoch, len(run.train))
    index = order[place * batch_size : (place + end - step) * batch_size]
    index = index.reshape(end - step, batch_size).T.astype(np.int32)
    index = devices.shard(np.split(index, jax.process_count())[jax.process_index()])
    call = lambda state, index=index: many(state, dataset, index)
    yield call, end - step
    step = end


def _end_of_call(run: Run, step: int) -> int:
  """The step at which a call ends. Calls end on a fixed grid, so that they are the same in a resumed run."""
  epoch_start = step - step % run.steps_per_epoch
  length = run.steps_per_call(run.steps_per_epoch)
  end = epoch_start + ((step - epoch_start) // length + 1) * length
  return min(end, epoch_start + run.steps_per_epoch, run.total_steps)


class Monitor:
  """Logs metrics and stops a run that diverges. It reads those of single-step calls late: the device never waits."""

  def __init__(self, run: Run, log: metric_log.MetricLog, display: progress.Plain, checkpoints: Checkpoints):
    self.run, self.log, self.display, self.checkpoints = run, log, display, checkpoints
    self.pending: collections.deque[tuple[int, int, dict[str, jax.Array], bool]] = collections.deque()
    self.window = [metric_log.rename(row) for row in checkpoints.unlogged()]  # metrics of the steps since the last row
    self.shown = False  # whether a step was displayed
    self.restart_clock()

  def restart_clock(self) -> None:
    """Restarts the measurement of speed, which excludes the time that an evaluation or a checkpoint took."""
    self.read_at, self.timed_steps, self.timed_seconds = time.monotonic(), 0, 0.0

  def add(self, step: int, count: int, metrics: dict[str, jax.Array], timed: bool = True) -> None:
    """Queues the metrics of a call of `count` steps that ended at `step`; `timed`: whether its speed counts."""
    self.pending.append((step, count, metrics, timed))
    # A multi-step call keeps the host busy launching kernels until it has nearly finished: nothing can overlap.
    while len(self.pending) > (IN_FLIGHT if count == 1 and self.shown else 0):
      self._read()

  def drain(self) -> None:
    """Reads all pending metrics."""
    while self.pending:
      self._read()

  def _read(self) -> None:
    step, count, metrics, timed = self.pending.popleft()
    metrics = {name: np.atleast_1d(x) for name, x in self.run.devices.unreplicate(metrics).items()}
    finite = np.isfinite(metrics['loss']) & np.isfinite(metrics['grad_norm'])
    if not finite.all():
      self._diverged(step - count + 1 + int(np.argmin(finite)))
    now = time.monotonic()
    if timed:
      self.timed_steps += count
      self.timed_seconds += now - self.read_at
    self.read_at = now
    every = self.run.config.log.every_steps
    ends = [at for at in range(step - count + 1, step + 1) if at % every == 0 or at == self.run.total_steps]
    speed = self.timed_steps * self.run.config.batch_size / max(self.timed_seconds, 1e-9)
    per_second = float(f'{speed:.6g}') if self.timed_steps else None
    for i in range(count):
      self.window.append({name: float(x[i]) for name, x in metrics.items()})
      if (at := step - count + 1 + i) in ends:
        self._row(at, per_second)
      elif not self.shown:  # the first step is displayed at once, and logged later in the first row
        self.display.show(at, self.window[-1] | {'epoch': self.run.epoch(at)})
      self.shown = True
    if ends:
      self.timed_steps, self.timed_seconds = 0, 0.0

  def _row(self, step: int, per_second: float | None) -> None:
    row = {name: math.fsum(m[name] for m in self.window) / len(self.window) for name in self.window[0]}
    self.window = []
    row['epoch'] = self.run.epoch(step)
    left = None
    if per_second is not None:
      row[f'{self.run.modality.name}_per_second'] = per_second
      left = (self.run.total_steps - step) * self.run.config.batch_size / per_second
    self.log.write(step, row)
    self.display.show(step, row, left)

  def _diverged(self, step: int) -> NoReturn:
    saved = self.checkpoints.latest()
    good = f'the last good checkpoint is step {saved}' if saved is not None else 'there is no checkpoint yet'
    raise Diverged(
      f'the loss or its gradient is not finite at step {step}; {good}. Lower optimizer.learning_rate, warm it up '
      f'(optimizer.warmup_epochs), raise the temperature, or compute in float32 (dtype)'
    )


@contextlib.contextmanager
def _stop_requests() -> Iterator[threading.Event]:
  """An event that the first SIGINT or SIGTERM sets; a second one interrupts immediately."""
  stop = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  previous: dict[int, Any] = {}

  def request(number, frame):
    stop.set()
    print('saving and stopping after this dispatch; interrupt again to stop at once', file=sys.stderr, flush=True)
    signal.signal(number, previous[number])

  for number in (signal.SIGINT, signal.SIGTERM):
    previous[number] = signal.signal(number, request)
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _machine(run: Run) -> dict:
  """For the summary: devices, peak memory of one device, jax version, commit of this code, date, and command."""
  device = run.devices.local[0]
  peak = (device.memory_stats() or {}).get('peak_bytes_in_use')  # unknown on a CPU
  return {
    'device': f'{len(run.devices.devices)} x {device.device_kind}',
    'jax': jax.__version__,
    'peak_memory_gib': peak and round(peak / 2**30, 2),
    'commit': metric_log.commit(),
    'date': time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()),
    'command': _command(),
  }


def _command() -> str | None:
  """The command line of this process; None if it does not run main.py."""
  program, *arguments = sys.argv
  return shlex.join(['python', 'main.py', *arguments]) if pathlib.Path(program).name == 'main.py' else None


def _require_outside(config: ConfigDict, workdir: str) -> None:
  """Raises a ValueError if the workdir is in a folder of images, where its pictures would become training images."""
  if config.data.source != 'folder' or not config.data.path:
    return
  root, place = pathlib.Path(config.data.path).expanduser(), pathlib.Path(workdir).expanduser().resolve()
  for split in resolve.split_names(config.data).values():
    if place.is_relative_to((root / split).resolve()):
      raise ValueError(f'--workdir={str(workdir)!r} is in the image folder {root / split}: give another directory')


def _require_same_examples(run: Run) -> None:
  """Raises an error in all processes if their training examples differ."""
  labels = None if run.train.labels is None else zlib.crc32(run.train.labels.tobytes())
  require_same({'the number of training examples': len(run.train), 'the checksum of the labels': labels})


def _require_shared(workdir: pathlib.Path, latest: int | None) -> None:
  """Raises an error in all processes if their workdirs, with the newest checkpoint `latest`, are different folders."""
  shared = '--workdir, which all processes must share,'
  require_same(
    {
      f'the step of the newest checkpoint in {shared}': latest,
      f'a new file of process 0 in {shared} is visible': shares(workdir),
    }
  )


def _displaced(run: Run) -> list[str]:
  """Messages about milestones of the learning rate before the end of the warm-up, or after the end of the run."""
  optimizer, end = run.config.optimizer, run.epoch(run.total_steps)
  if optimizer.schedule != 'step':
    return []
  among = lambda chosen: ', '.join(f'{epoch:g}' for epoch in optimizer.milestones if chosen(epoch))
  messages = []
  if early := among(lambda epoch: epoch < optimizer.warmup_epochs):
    ready = f'the warm-up ends at epoch {optimizer.warmup_epochs:g}'
    messages.append(f'{ready}: the learning rate drops then, not at {early} (optimizer.milestones)')
  if late := among(lambda epoch: epoch >= end):
    messages.append(f'the run ends at epoch {end:g}: the learning rate does not drop at {late} (optimizer.milestones)')
  return messages


def _opening(run: Run, workdir: pathlib.Path, first: int, forked: bool) -> str:
  config, kind = run.config, run.devices.devices[0].device_kind
  start = f'starts from {config.init}' if run.initial_weights else 'starts'
  if first:
    start = f'forks {config.fork}' if forked else f'resumes at step {first}'
  return (
    f'{config.method.name}, {config.model.name}, {config.data.name} ({len(run.train):,} {run.modality.name}): '
    f'{run.total_steps:,} steps of {config.batch_size} on {len(run.devices.devices)} x {kind}; {start} in {workdir}'
  )
