"""Maps a per-device function over devices with pmap or shard_map, with the same results either way.

A mapped function takes replicated arguments first, then sharded ones. Collectives inside it use the axis `AXIS`. Under
pmap, arrays have a leading device axis; under shard_map, they are global and carry their sharding. `Devices` hides the
difference.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ssl_jax.registry import show

AXIS = 'batch'
SAY_SECONDS, JOIN_SECONDS = 10, 290  # seconds until a process says that it waits for the others, and until it gives up
LARGEST_COPY = 2**30  # bytes sent to a device at once
COMPILATION = '/jax/core/compile/backend_compile_duration'  # JAX's event for time spent in XLA's compiler

_compilations: list[float] = []  # seconds of each compilation in this process


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
  if event == COMPILATION:
    _compilations.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_heard)


def compile_seconds() -> float:
  """Seconds that this process has spent on compilation, including loads from the compilation cache."""
  return math.fsum(_compilations)


def start(processes: int, cpu_devices: int) -> None:
  """Splits the CPU into several devices and connects to the other processes. Call it before the first use of a device.

  On a cluster (TPU, Slurm, MPI), JAX finds the other processes by itself. Elsewhere, set JAX_COORDINATOR_ADDRESS to the
  host:port of the first process and JAX_PROCESS_ID to 0, 1, ... The only process of a host uses all of its GPUs.
  """
  if cpu_devices > 1 and 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    jax.config.update('jax_num_cpu_devices', cpu_devices)
  if processes > 1:
    own = os.environ.get('JAX_PROCESS_ID')  # JAX does not read this variable
    try:
      given: dict[str, Any] = {} if own is None else dict(num_processes=processes, process_id=int(own))
      if (own is not None or _one_per_host(os.environ)) and 'JAX_LOCAL_DEVICE_IDS' not in os.environ:
        given['local_device_ids'] = []  # all: JAX gives each Slurm or Open MPI process one GPU
      with _joining(processes):
        jax.distributed.initialize(**given)
    except ValueError as error:  # not a cluster that JAX recognizes
      raise ValueError(
        f'parallel.processes = {processes}, but the other processes are unknown ({error}): set '
        f'JAX_COORDINATOR_ADDRESS (host:port of the first) and JAX_PROCESS_ID (0 to {processes - 1}), or start under '
        'Slurm, MPI or on a TPU pod; to use this process alone, give --config.parallel.processes=1'
      ) from None
    if jax.process_count() != processes:
      raise ValueError(f'parallel.processes = {processes}, but {jax.process_count()} joined: start one per host')


def _one_per_host(environment: Mapping[str, str]) -> bool:
  """Whether Slurm or Open MPI has started one process on each host."""
  tasks = environment.get('SLURM_NTASKS')
  slurm = tasks is not None and tasks == environment.get('SLURM_STEP_NUM_NODES')
  return slurm or environment.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'


@contextlib.contextmanager
def _joining(processes: int) -> Iterator[None]:
  """Says that this process waits for the others, and ends it if they do not come. JAX would abort without a reason."""
  address = os.environ.get('JAX_COORDINATOR_ADDRESS', 'the address that the cluster gives')

  def give_up():
    print(
      f'ssl_jax: parallel.processes = {processes}, but not all have joined after {JOIN_SECONDS} seconds: start the '
      f'same command on every host, and check that each can reach the first process ({address})',
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)

  say = lambda: print(f'waiting for all {processes} processes (the first is at {address}) ...', flush=True)
  timers = [threading.Timer(SAY_SECONDS, say), threading.Timer(JOIN_SECONDS, give_up)]
  for timer in timers:
    timer.daemon = True
    timer.start()
  try:
    yield
  finally:
    for timer in timers:
      timer.cancel()


class Different(ValueError):
  """The processes have different settings or data. All of them raise this error."""


def require_same(settings: Mapping[str, Any]) -> None:
  """Raises `Different` if a setting differs between processes: they would average gradients of different runs."""
  if jax.process_count() == 1:
    return
  mine = json.dumps(settings, default=str).encode()
  longest = int(multihost_utils.process_allgather(np.array(len(mine))).max())
  gathered = multihost_utils.process_allgather(np.frombuffer(mine.ljust(longest), np.uint8))
  first, *others = [json.loads(row.tobytes()) for row in gathered]
  for process, other in enumerate(others, start=1):
    for key in first | other:
      if first.get(key) != other.get(key):
        found = f'{show(first.get(key))} in process 0, but {show(other.get(key))} in process {process}'
        raise Different(f'{key} = {found}: start all with the same command and data')


def shares(folder: pathlib.Path) -> bool:
  """Whether a new file of the first process in `folder` appears in this process."""
  if jax.process_count() == 1:
    return True
  number = int(multihost_utils.broadcast_one_to_all(np.array(secrets.randbits(31))))
  file = folder / f'.shared-{number}'
  if jax.process_index() == 0:
    file.touch()
  multihost_utils.sync_global_devices('the file is there')
  found = file.exists()
  multihost_utils.sync_global_devices('all have looked for it')
  if jax.process_index() == 0:
    file.unlink(missing_ok=True)
  return found


def compile_faster(deterministic: bool) -> None:
  """Caches compiled programs between runs and disables Triton GEMMs. Call it before `start`: XLA reads its flags once.

  The cache is in JAX_COMPILATION_CACHE_DIR, or in ~/.cache/ssl_jax. On an H200, autotuning Triton kernels against
  cuBLAS took half of the time before the first step and most of the time of an evaluation, without faster steps. To
  enable Triton GEMMs, set XLA_FLAGS=--xla_gpu_enable_triton_gemm=true. `deterministic` excludes GPU kernels whose
  order of summation varies between runs.
  """
  if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined, unused-ignore]  # unused from jax 0.11
    jax.config.update('jax_compilation_cache_dir', str(pathlib.Path('~/.cache/ssl_jax').expanduser()))
  for flag, value in {'xla_gpu_enable_triton_gemm': False, 'xla_gpu_deterministic_ops': deterministic}.items():
    if flag not in (flags := os.environ.get('XLA_FLAGS', '')):
      os.environ['XLA_FLAGS'] = f'{flags} --{flag}={str(value).lower()}'.strip()


def jit_once(function: Callable) -> Callable:
  """jax.jit for a function that is called once, such as an initialization: faster compilation, slower execution.

  On two CPU cores, initializing a ResNet-18 of width 8 takes 3 s to compile instead of 19 s, with identical weights.
  """
  least = jax.config.read('jax_disable_most_optimizations')
  return jax.jit(function, compiler_options=None if least else {'xla_backend_optimization_level': 1})


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices that share each batch, and how a function is mapped over them."""

  kind: str  # pmap or shard_map
  devices: tuple[jax.Device, ...]

  @classmethod
  def choose(cls, kind: str, count: int) -> 'Devices':
    """All devices, or the first `count` devices if there is only one process."""
    # A batch is split into one contiguous part per process. On some clusters, ids alternate between processes.
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if count and jax.process_count() > 1:
      raise ValueError(f'parallel.devices = {count} must be 0 with several processes: each uses all of its devices')
    if count > len(devices):
      raise ValueError(f'parallel.devices = {count} must be at most {len(devices)}, the devices here, or 0 for all')
    return cls(kind, tuple(devices[: count or len(devices)]))

  @functools.cached_property
  def local(self) -> tuple[jax.Device, ...]:
    """The devices of this process."""
    return tuple(d for d in self.devices if d.process_index == jax.process_index())

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    # jax.make_mesh may reorder devices, and refuses those of several GPU hosts.
    return jax.sharding.Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

  def replicate(self, tree: Any) -> Any:
    """Copies host values to each device."""
    if self.kind == 'pmap':
      return jax.tree.map(lambda x: self._stack([np.asarray(x)] * len(self.local)), tree)
    return jax.tree.map(self._copies, tree)

  def unreplicate(self, tree: Any) -> Any:
    """One copy of a replicated value, as numpy arrays."""
    one = jax.device_get(jax.tree.map(lambda x: x.addressable_shards[0].data, tree))
    return jax.tree.map(lambda x: x[0], one) if self.kind == 'pmap' else one

  def shard(self, tree: Any) -> Any:
    """Splits this process's part of a batch along the first axis, one shard per device."""
    if self.kind == 'pmap':
      return jax.tree.map(lambda x: self._stack(np.split(x, len(self.local))), tree)
    sharding = NamedSharding(self.mesh, P(AXIS))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)

  def unshard(self, tree: Any) -> Any:
    """The shards of this process's devices, concatenated along the first axis, as numpy arrays."""

    def join(x):
      shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
      parts = jax.device_get([s.data for s in shards])
      return np.concatenate([part[0] for part in parts] if self.kind == 'pmap' else parts)

    return jax.tree.map(join, tree)

  def map(
    self, fn: Callable, *, replicated: int, sharded: int = 1, out: str = 'replicated', donate: tuple[int, ...] = ()
  ) -> Callable:
    """`fn` mapped over the devices: the first `replicated` arguments are copies, the next `sharded` ones are shards.

    Args:
      out: whether the results are 'replicated' or 'sharded'.
      donate: positions of the arguments whose memory the results may reuse.
    """
    if self.kind == 'pmap':
      return jax.pmap(fn, AXIS, devices=self.devices, donate_argnums=donate)
    specs = (P(),) * replicated + (P(AXIS),) * sharded
    out_specs = P() if out == 'replicated' else P(AXIS)
    # check_vma=False, because the update averages gradients itself. True would silently sum them once more.
    mapped = jax.shard_map(fn, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)

  def _stack(self, parts):
    """One array per local device -> one array with a leading device axis, as pmap takes it."""
    mesh = jax.sharding.Mesh(np.array(self.local), (AXIS,))
    placed = [_put(part[None], device, axis=1) for part, device in zip(parts, self.local, strict=True)]
    shape = (len(placed), *placed[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P(AXIS)), placed)

  def _copies(self, x):
    """An array that is replicated on every device."""
    placed = [_put(np.asarray(x), device, axis=0) for device in self.local]
    return jax.make_array_from_single_device_arrays(placed[0].shape, NamedSharding(self.mesh, P()), placed)


def _put(x: np.ndarray, device: jax.Device, axis: int) -> jax.Array:
  """Puts an array on a device. Large ones are sent in parts along `axis`, because JAX stages them in pinned memory."""
  if x.nbytes <= LARGEST_COPY:
    return jax.device_put(x, device)
  whole = jax.jit(lambda: jnp.zeros(x.shape, x.dtype), out_shardings=SingleDeviceSharding(device))()
  fill = jax.jit(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis), donate_argnums=0)
  number = math.ceil(x.nbytes / LARGEST_COPY)
  start = 0
  for part in np.array_split(x, min(number, x.shape[axis]), axis):
    whole = fill(whole, jax.device_put(part, device), start)
    start += part.shape[axis]
  return whole
