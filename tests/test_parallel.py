"""pmap and shard_map give the same results, in one process and in two."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import portpicker
import pytest

from ssl_jax import train
from ssl_jax.run import devices
from ssl_jax.run.devices import AXIS, Devices
from ssl_jax.run.update import make_update
from ssl_jax.workdir import metric_log
from tests.helpers import tiny

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize('kind', ['pmap', 'shard_map'])
@pytest.mark.parametrize('count', [1, 2, 4])
def test_values_survive_the_round_trip_to_the_devices(kind, count):
  devices = Devices.choose(kind, count)
  rows = np.arange(24, dtype=np.float32).reshape(8, 3)

  def step(total, rows):
    local = rows * 2.0
    return total + jax.lax.psum(jnp.sum(local), AXIS), local

  total = devices.map(lambda t, r: step(t, r)[0], replicated=1)(devices.replicate(np.float32(1)), devices.shard(rows))
  assert devices.unreplicate(total) == 1 + 2 * rows.sum()
  local = devices.map(lambda t, r: step(t, r)[1], replicated=1, out='sharded')
  np.testing.assert_array_equal(devices.unshard(local(devices.replicate(np.float32(1)), devices.shard(rows))), rows * 2)
  tree = {'a': rows, 'b': (np.int32(3),)}
  jax.tree.map(np.testing.assert_array_equal, devices.unreplicate(devices.replicate(tree)), tree)


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU of a cluster, where each host is a slice."""

  id: int
  process_index: int
  slice_index: int
  device_kind: str = 'NVIDIA H200'
  platform: str = 'gpu'


def test_the_devices_of_a_process_are_next_to_each_other(monkeypatch):
  monkeypatch.setattr(jax, 'devices', lambda: [Gpu(id=k, process_index=k % 2, slice_index=k % 2) for k in range(4)])
  chosen = Devices.choose('shard_map', 0)
  assert [d.id for d in chosen.devices] == [d.id for d in chosen.mesh.devices] == [0, 2, 1, 3]
  assert chosen.mesh.axis_types == (jax.sharding.AxisType.Auto,)


@pytest.mark.parametrize('kind', ['pmap', 'shard_map'])
def test_a_large_array_is_copied_in_parts(kind, monkeypatch):
  images = np.random.default_rng(0).integers(0, 256, (11, 4, 4, 3), np.uint8)
  monkeypatch.setattr(devices, 'LARGEST_COPY', 3 * images[0].nbytes)
  sent, put = [], jax.device_put
  monkeypatch.setattr(jax, 'device_put', lambda x, device: sent.append(x.nbytes) or put(x, device))
  chosen = Devices.choose(kind, 2)
  placed = chosen.replicate(images)
  assert max(sent) <= devices.LARGEST_COPY and sum(sent) == 2 * images.nbytes
  np.testing.assert_array_equal(chosen.unreplicate(placed), images)
  taken = chosen.map(lambda images, k: images[k], replicated=1, out='sharded')(placed, chosen.shard(np.arange(4)))
  np.testing.assert_array_equal(chosen.unshard(taken), images[:4])


@pytest.mark.parametrize('kind', ['pmap', 'shard_map'])
def test_donated_buffers_are_reused(kind):
  devices = Devices.choose(kind, 2)
  state = devices.replicate(np.zeros(4, np.float32))
  devices.map(lambda s, r: s + jnp.sum(r), replicated=1, donate=(0,))(state, devices.shard(np.ones(2, np.float32)))
  assert state.is_deleted()


def test_the_mean_of_local_gradients_is_the_global_gradient():
  """Every loss and batch norm relies on this, with gathered terms too; broken, it is off by the number of devices."""
  rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
  weight = np.float32(0.7)

  def local_loss(w, rows):
    gathered = jax.lax.all_gather(jnp.tanh(w * rows), AXIS, tiled=True)
    return jnp.mean((jnp.tanh(w * rows) @ gathered.T) ** 2)

  whole = jax.grad(lambda w: jnp.mean((jnp.tanh(w * rows) @ jnp.tanh(w * rows).T) ** 2))(jnp.asarray(weight))
  for kind in ('pmap', 'shard_map'):
    for count in (1, 2, 4):
      devices = Devices.choose(kind, count)
      grad = devices.map(lambda w, r: jax.lax.pmean(jax.grad(local_loss)(w, r), AXIS), replicated=1)
      np.testing.assert_allclose(
        devices.unreplicate(grad(devices.replicate(weight), devices.shard(rows))), whole, rtol=1e-5
      )


def test_an_update_under_a_mapping_that_checks_is_refused():
  """With check_vma=True the gradient would be too large by the number of devices, whatever the method."""
  update = make_update(None, None, None, [], seed=0, axis_name=AXIS)
  mesh, spec = Devices.choose('shard_map', 2).mesh, jax.sharding.PartitionSpec(AXIS)
  mapped = jax.shard_map(lambda index: update(None, None, index), mesh=mesh, in_specs=spec, out_specs=spec)
  with pytest.raises(ValueError, match=r'check_vma=True.*: give check_vma=False'):
    jax.jit(mapped)(np.arange(4))


WORKER = """
import sys
from ssl_jax import config, train
from ssl_jax.run import devices
from configs import base
devices.start(2, 1)
train.train(config.restore(__import__('json').loads(sys.argv[1]), base.get_config()), sys.argv[2])
"""


@contextlib.contextmanager
def two_processes(chosen, workdir):
  """Two processes with one device each, which train a run together."""
  command = [sys.executable, '-c', WORKER, json.dumps(chosen.to_dict()), str(workdir)]
  coordinator = {'JAX_COORDINATOR_ADDRESS': f'localhost:{portpicker.pick_unused_port()}'}
  environment = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)} | coordinator
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  start = lambda process: subprocess.Popen(command, env=environment | {'JAX_PROCESS_ID': str(process)}, **pipes)
  with start(0) as first, start(1) as second:
    try:
      yield first, second
    finally:
      first.kill(), second.kill()


@pytest.mark.slow
def test_two_processes_train_the_run_of_one(tmp_path):
  """Two devices of one process, and two processes with one device each: the same losses and the same kNN."""
  changes = {'steps': 4, 'checkpoint.every_steps': 2}
  train.train(tiny(tmp_path, **changes, **{'parallel.devices': 2}), tmp_path / 'one')
  with two_processes(tiny(tmp_path, **changes, **{'parallel.devices': 0}), tmp_path / 'two') as processes:
    outputs = [process.communicate(timeout=400)[0] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], outputs
  one, two = metric_log.read(tmp_path / 'one'), metric_log.read(tmp_path / 'two')
  assert [row['step'] for row in one] == [row['step'] for row in two] == [1, 2, 3, 4, 4]
  for row, other in zip(one, two, strict=True):
    for name in {'loss', 'knn5'} & row.keys():
      np.testing.assert_allclose(other[name], row[name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('scan', [1, 2])
def test_a_signal_to_one_process_stops_all_and_everything_is_saved(tmp_path, scan):
  changes = {'steps': 10_000, 'eval.k': (), 'parallel.devices': 0, 'parallel.steps_per_call': scan}
  with two_processes(tiny(tmp_path, **changes), tmp_path / 'run') as processes:
    while len(metric_log.read(tmp_path / 'run')) < 3 and not any(process.poll() for process in processes):
      time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=400)[0] for process in processes]
  stopped = [re.search(r'Interrupted: stopped at step (\d+) of 10000 and saved', text) for text in outputs]
  assert all(stopped), outputs
  assert {int(found[1]) for found in stopped} == {int(path.name) for path in (tmp_path / 'run/checkpoints').iterdir()}


VISIBLE = """
import os, sys
from jax._src import xla_bridge
from ssl_jax.run import devices
devices.start(2, 1)
sys.stdout.write(xla_bridge.CUDA_VISIBLE_DEVICES.value)
"""


@pytest.mark.parametrize(('hosts', 'local', 'visible'), [(2, (0, 0), ['all', 'all']), (1, (0, 1), ['0', '1'])])
def test_under_slurm_the_only_process_of_a_host_has_all_of_its_gpus(hosts, local, visible):
  """JAX itself gives each process one GPU: four hosts of eight GPUs would train on four."""
  job = {'SLURM_JOB_ID': str(portpicker.pick_unused_port()), 'SLURM_STEP_NODELIST': 'localhost'}
  job |= {'SLURM_NTASKS': '2', 'SLURM_STEP_NUM_NODES': str(hosts)}
  started = [
    subprocess.Popen(
      [sys.executable, '-c', VISIBLE],
      env=os.environ | job | {'SLURM_PROCID': str(process), 'SLURM_LOCALID': str(own)} | {'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      text=True,
    )
    for process, own in enumerate(local)
  ]
  assert [process.communicate(timeout=120)[0] for process in started] == visible


@pytest.mark.parametrize('process', [0, 1])
def test_a_process_whose_partner_does_not_come_ends_in_one_line(process):
  program = 'from ssl_jax.run import devices; devices.SAY_SECONDS, devices.JOIN_SECONDS = 0, 1; devices.start(2, 1)'
  address = f'localhost:{portpicker.pick_unused_port()}'
  environment = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_PROCESS_ID': str(process), 'PYTHONPATH': str(ROOT)}
  ended = subprocess.run(
    [sys.executable, '-c', program], env=os.environ | environment, capture_output=True, text=True, timeout=120
  )
  assert (ended.returncode, ended.stdout.count('waiting for all 2 processes')) == (1, 1)
  assert re.fullmatch(r'ssl_jax: parallel.processes = 2, but not all have joined .*\n', ended.stderr)
  assert address in ended.stderr


def test_xla_flags_of_the_user_are_kept(monkeypatch):
  monkeypatch.setattr(devices.jax.config, 'update', lambda *_: None)
  for given, expected in (
    ('', '--xla_gpu_enable_triton_gemm=false --xla_gpu_deterministic_ops=true'),
    ('--xla_one=1', '--xla_one=1 --xla_gpu_enable_triton_gemm=false --xla_gpu_deterministic_ops=true'),
    ('--xla_gpu_enable_triton_gemm=true', '--xla_gpu_enable_triton_gemm=true --xla_gpu_deterministic_ops=true'),
    ('--xla_gpu_deterministic_ops=false', '--xla_gpu_deterministic_ops=false --xla_gpu_enable_triton_gemm=false'),
  ):
    monkeypatch.setenv('XLA_FLAGS', given)
    devices.compile_faster(deterministic=True)
    assert os.environ['XLA_FLAGS'] == expected
