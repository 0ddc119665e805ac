"""Timing and tables of the benchmarks."""

import argparse
import functools
import importlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np

from ssl_jax.run.devices import compile_faster

# jax reads this at the first use of the device. Peers in the same process need device memory too.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
os.environ.setdefault('TORCHINDUCTOR_FORCE_DISABLE_CACHES', '1')  # so that the first call includes all compilation
WIDTHS = (24, 42, 12, 10, 10, 24)
SHORTEST = 0.05  # seconds per sample; shorter calls are repeated


def optional(name: str) -> ModuleType | None:
  """The module, or None if it is not installed."""
  try:
    return importlib.import_module(name)
  except ImportError:
    return None


torch = optional('torch')
WITHOUT_TORCH = 'torch is not installed, or does not support this device'


@functools.cache  # not at import: workers of a loader import this module and must not use the device
def device() -> str:
  """The device of jax, under torch's name."""
  return 'cuda' if jax.default_backend() == 'gpu' else 'cpu'


def torch_runs() -> bool:
  """Whether torch is installed and runs on the device of jax."""
  return torch is not None and torch.cuda.is_available() == (device() == 'cuda')


def arguments(doc: str, **extra: int | str) -> argparse.Namespace:
  """Parses the flags: --quick, and one flag for each of `extra`, with its default and the type of the default."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='small sizes and few rounds, for a CPU')
  for name, default in extra.items():
    parser.add_argument(f'--{name}', type=type(default), default=default)
  return parser.parse_args()


def compile_as_main() -> None:
  """Sets the XLA options of main.py and disables the compilation cache. Call it before the first use of a device."""
  compile_faster(deterministic=True)
  jax.config.update('jax_enable_compilation_cache', False)


def wait(result: Any) -> None:
  """Waits until the device has finished."""
  jax.block_until_ready(result)
  if torch_runs() and device() == 'cuda':
    torch.cuda.synchronize()


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-4) -> None:
  """Checks that all arrays are equal up to `tolerance` times the largest entry of ours."""
  leaves = [[x.detach().cpu() if hasattr(x, 'detach') else x for x in jax.tree.leaves(y)] for y in (ours, theirs)]
  for a, b in zip(*(map(np.asarray, x) for x in leaves), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())


def jax_memory(jitted: Callable, *args) -> int:
  """Bytes that a jitted function needs in addition to its arguments."""
  sizes = jitted.lower(*args).compile().memory_analysis()
  return sizes.temp_size_in_bytes + sizes.output_size_in_bytes


def torch_memory(call: Callable) -> int | None:
  """The same for a torch call; None on a CPU, where torch does not report it."""
  if device() == 'cpu':
    return None
  wait(None)
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  wait(call())
  return torch.cuda.max_memory_allocated() - before


def _sample(call, times=1, clock=time.perf_counter):
  start = clock()
  for _ in range(times):
    result = call()
  wait(result)
  return (clock() - start) / times, result


class Table:
  """One row per implementation. `unit` is what is counted per second, such as images; without it, memory is shown."""

  def __init__(self, title: str, quick: bool, unit: str = '', ratio: str = 'peer / ours', rounds: int = 7):
    self.rounds, self.unit = 3 if quick else rounds, unit
    versions = f'jax {jax.__version__}' + (f', torch {torch.__version__}' if torch_runs() else '')
    print(f'{title.splitlines()[0]}\n{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores, {versions}; ', end='')
    print(f'median of {self.rounds} rounds; in brackets the smallest and largest ratio\n')
    self._row('case', 'who', 'first call s', 'then s', f'{unit}/s' if unit else 'MiB', ratio)
    self._row(*['-' * n for n in WIDTHS])

  def compare(
    self,
    case: str,
    calls: dict[str, Callable | str],
    *,
    same: Callable | None = None,
    items: int = 0,
    memory: Callable | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ) -> None:
    """Times `calls` alternately, ours first, so that other load on the machine affects all of them.

    Args:
      calls: a string instead of a call is the reason why there is none.
      same: asserts that our result and a peer's agree, before anything is timed; a peer that differs is not timed.
      items: the number of `unit` per call.
      memory: name -> bytes or None; called after the timing.
      clock: returns seconds; time.process_time excludes other processes.
    """
    ours, first, results, why, times = next(iter(calls)), {}, {}, {}, {}
    for name, call in calls.items():
      if isinstance(call, str):
        why[name] = call
        continue
      try:
        first[name], results[name] = _sample(call, clock=clock)
        print(f'{case}, {name}: first call {first[name]:.1f} s', file=sys.stderr, flush=True)
      except RuntimeError as error:  # out of memory, or no compiler
        if name == ours:
          raise
        why[name] = f'failed: {str(error).strip().splitlines()[0][:80]}'
    for name in list(results)[1:] if same else []:
      try:
        same(results[ours], results[name])
      except AssertionError as error:
        why[name] = f'differs: {" ".join(str(error).split())[:120]}'
        del results[name]
    running = list(results)
    results.clear()
    repeats = {name: math.ceil(SHORTEST / _sample(calls[name], clock=clock)[0]) for name in running}
    for _ in range(self.rounds):
      for name in running:
        times.setdefault(name, []).append(_sample(calls[name], repeats[name], clock)[0])
    for name in calls:
      if name in why:
        self._row(case, name, '', '', '', why[name])
        continue
      seconds = statistics.median(times[name])
      ratios = [b / a for a, b in zip(times[ours], times[name], strict=True)]
      ratio = f'{seconds / statistics.median(times[ours]):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
      size = memory and memory(name)
      fifth = f'{items / seconds:,.0f}' if items else f'{size / 2**20:,.1f}' if size else ''
      self._row(case, name, f'{first[name]:.2f}', f'{seconds:.3g}', fifth, '1' if name == ours else ratio)

  def _row(self, *cells):
    print('| ' + ' | '.join(f'{c:<{n}}' for c, n in zip(cells, WIDTHS, strict=True)) + ' |', flush=True)
