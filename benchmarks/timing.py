"""The clock and the table of the benchmarks."""

import argparse
import functools
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

# Read when jax takes the device, at its first use: a peer in the same process needs memory of it too.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
os.environ.setdefault('TORCHINDUCTOR_FORCE_DISABLE_CACHES', '1')  # so that a first call is a first call
WIDTHS = (24, 42, 12, 10, 10, 24)
SHORTEST = 0.05  # seconds that a sample lasts, by several calls in a row where one is shorter


def optional(name: str):
  """The module, or None where it is not installed."""
  try:
    return importlib.import_module(name)
  except ImportError:
    return None


torch = optional('torch')
WITHOUT_TORCH = 'torch is not installed, or not for this device'


@functools.cache  # not at import: a loader's workers import this too, and must leave the device alone
def device() -> str:
  """The device of jax, as torch names it."""
  return 'cuda' if jax.default_backend() == 'gpu' else 'cpu'


def torch_runs() -> bool:
  """Whether torch is installed and runs on the device of jax."""
  return torch is not None and torch.cuda.is_available() == (device() == 'cuda')


def arguments(doc: str, **extra):
  """The flags: --quick, and an int flag for each of `extra` with its default."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='small sizes and few rounds, for a CPU')
  for name, default in extra.items():
    parser.add_argument(f'--{name}', type=int, default=default)
  return parser.parse_args()


def wait(result) -> None:
  """Until the device has finished."""
  jax.block_until_ready(result)
  if torch_runs() and device() == 'cuda':
    torch.cuda.synchronize()


def assert_close(ours, theirs, tolerance: float = 1e-4) -> None:
  """Each array of theirs is ours, up to `tolerance` of its largest entry."""
  leaves = [[x.detach().cpu() if hasattr(x, 'detach') else x for x in jax.tree.leaves(y)] for y in (ours, theirs)]
  for a, b in zip(*(map(np.asarray, x) for x in leaves), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())


def jax_memory(jitted, *args) -> int:
  """Bytes that a jitted function needs beside its arguments."""
  sizes = jitted.lower(*args).compile().memory_analysis()
  return sizes.temp_size_in_bytes + sizes.output_size_in_bytes


def torch_memory(call) -> int | None:
  """The same of a torch call; a CPU does not tell."""
  if device() == 'cpu':
    return None
  wait(None)
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  wait(call())
  return torch.cuda.max_memory_allocated() - before


def _sample(call, times=1):
  start = time.perf_counter()
  for _ in range(times):
    result = call()
  wait(result)
  return (time.perf_counter() - start) / times, result


class Table:
  """Rows of contestants; `unit` is what is counted a second, such as images; without it memory is shown."""

  def __init__(self, title: str, quick: bool, unit: str = '', ratio: str = 'peer / ours'):
    self.rounds, self.unit = 3 if quick else 7, unit
    versions = f'jax {jax.__version__}' + (f', torch {torch.__version__}' if torch_runs() else '')
    print(f'{title.splitlines()[0]}\n{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores, {versions}; ', end='')
    print(f'median of {self.rounds} rounds, least and greatest ratio\n')
    self._row('case', 'who', 'first call s', 'then s', f'{unit}/s' if unit else 'MiB', ratio)
    self._row(*['-' * n for n in WIDTHS])

  def compare(self, case: str, calls: dict[str, Callable | str], *, same=None, items=0, memory=None) -> None:
    """Times `calls`, ours first, in turns, so that what disturbs the machine disturbs all alike.

    Args:
      calls: a string in place of a call says why there is none.
      same: asserts that a result of ours and one of theirs are the same thing; called before anything is timed.
      items: how many `unit` a call handles.
      memory: name -> its bytes or None; called after the timing.
    """
    ours, first, results, why, times = next(iter(calls)), {}, {}, {}, {}
    for name, call in calls.items():
      if isinstance(call, str):
        why[name] = call
        continue
      try:
        first[name], results[name] = _sample(call)
      except RuntimeError as error:  # out of memory, or a compiler that is not there
        if name == ours:
          raise
        why[name] = f'failed: {str(error).strip().splitlines()[0][:80]}'
    running = list(results)
    for name in running[1:] if same else []:
      same(results[ours], results[name])
    results.clear()
    repeats = {name: math.ceil(SHORTEST / _sample(calls[name])[0]) for name in running}
    for _ in range(self.rounds):
      for name in running:
        times.setdefault(name, []).append(_sample(calls[name], repeats[name])[0])
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
