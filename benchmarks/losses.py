"""NT-Xent forward and backward: ours (dense and in blocks), optax's, and the usual torch code.

  python -m benchmarks.losses [--quick]

On a GPU, large batches are timed as well: blocks that stay in on-chip memory against the same blocks in plain JAX. Then
the errors of the loss and its gradient relative to float64 are printed, for low temperatures.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import timing
from benchmarks.timing import torch
from ssl_jax import losses, stream, temperature

torch_peers = timing.optional('benchmarks.torch_peers')
TAU, WIDTH = 0.2, 128


def jax_loss(loss: Callable, z1: jax.Array, z2: jax.Array) -> tuple[Callable, Callable]:
  """(jitted value and gradients, call)"""
  jitted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  return jitted, lambda: jitted(z1, z2)


def optax_loss(z1: jax.Array, z2: jax.Array) -> jax.Array:
  return optax.losses.ntxent(jnp.concatenate([z1, z2]), jnp.tile(jnp.arange(len(z1)), 2), TAU)


def torch_loss(loss: Callable, z1: np.ndarray, z2: np.ndarray) -> Callable:
  leaves = [torch.tensor(z, device=timing.device(), requires_grad=True) for z in (z1, z2)]

  def call():
    value = loss(*leaves, TAU)
    return value, torch.autograd.grad(value, leaves)

  return call


def large(table: timing.Table, queries: int, tau: temperature.Temperature, name: str) -> None:
  """Times blocks in on-chip memory and in plain JAX, and the whole matrix and torch if they fit into memory."""
  arrays = np.random.default_rng(0).standard_normal((2, queries // 2, WIDTH), np.float32)
  z = [jnp.asarray(x) for x in arrays]
  calls, jitted = {}, {}
  for who, form, block in (('on the chip', 'auto', 1024), ('plain JAX', 'plain', 1024), ('whole matrix', 'auto', 0)):
    if block or queries <= 32_768:
      who = f'ssl_jax, block={block}, {who}' if block else 'ssl_jax, whole matrix'
      with stream.form(form):
        compute = jax.value_and_grad(lambda z1, z2, b=block: losses.nt_xent(z1, z2, tau, block=b).mean(), (0, 1))
        jitted[who] = jax.jit(compute).lower(*z).compile()
      calls[who] = lambda f=jitted[who]: f(*z)
  if timing.torch_runs() and not callable(tau) and queries <= 32_768:
    calls['torch'] = torch_loss(torch_peers.nt_xent, *arrays)

  def memory(who):
    if who not in jitted:
      return timing.torch_memory(calls[who])
    sizes = jitted[who].memory_analysis()
    return sizes.temp_size_in_bytes + sizes.output_size_in_bytes

  table.compare(f'2B = {queries:,}, {name}', calls, same=timing.assert_close, memory=memory)


def errors(queries: int = 4096) -> None:
  """Prints the errors, relative to float64, of blocks in on-chip memory and in plain JAX."""
  rng = np.random.default_rng(0)
  z = rng.standard_normal((queries // 2, WIDTH)) + 1.5 * rng.standard_normal((64, WIDTH))[np.arange(queries // 2) % 64]
  z = np.stack([z, z + 0.1 * rng.standard_normal(z.shape)])

  def mean(z, tau, block):
    return losses.nt_xent(*z, tau, block=block).mean()

  for low in (0.05, 0.01):
    given = dict(tau=temperature.cosine(low, 2 * low))
    with jax.enable_x64(True):
      compute = jax.jit(jax.value_and_grad(functools.partial(mean, **given, block=0)))
      value, gradient = jax.tree.map(np.asarray, compute(z))
    for form, where in (('auto', 'on the chip'), ('plain', 'in plain JAX')):
      with stream.form(form):
        compute = jax.jit(jax.value_and_grad(functools.partial(mean, **given, block=512)))
        found, slopes = compute(z.astype(np.float32))
      off = np.linalg.norm(np.float64(slopes) - gradient) / np.linalg.norm(gradient)
      print(f'tau from {low} to {2 * low}, {where}: value {abs(found / value - 1):.1e}, gradient {off:.1e}', flush=True)


def main() -> None:
  quick = timing.arguments(__doc__).quick
  timing.compile_as_main()
  table = timing.Table(__doc__, quick)
  for size in (256, 1024) if quick else (256, 1024, 4096):
    arrays = np.random.default_rng(0).standard_normal((2, size // 2, WIDTH), np.float32)
    z1, z2 = map(jnp.asarray, arrays)
    ours, ours_call = jax_loss(lambda z1, z2: losses.nt_xent(z1, z2, TAU).mean(), z1, z2)
    block = size // 8
    blocks, blocks_call = jax_loss(lambda z1, z2, b=block: losses.nt_xent(z1, z2, TAU, block=b).mean(), z1, z2)
    optaxs, optax_call = jax_loss(optax_loss, z1, z2)
    calls = {'ssl_jax.losses.nt_xent': ours_call, f'ssl_jax.losses.nt_xent, block={block}': blocks_call}
    calls |= {'optax.losses.ntxent': optax_call}
    calls |= {'torch': timing.WITHOUT_TORCH, 'torch.compile': timing.WITHOUT_TORCH}
    jitted = dict(zip(calls, (ours, blocks, optaxs), strict=False))
    if size > 1024 and timing.device() == 'cpu':
      calls['optax.losses.ntxent'] = 'skipped on a CPU: it would need about 24 GiB'
    if timing.torch_runs():
      calls['torch'] = torch_loss(torch_peers.nt_xent, *arrays)
      calls['torch.compile'] = torch_loss(torch.compile(torch_peers.nt_xent, dynamic=False), *arrays)

    def memory(name, jitted=jitted, calls=calls, z=(z1, z2)):
      return timing.jax_memory(jitted[name], *z) if name in jitted else timing.torch_memory(calls[name])

    table.compare(f'2B = {size}', calls, same=timing.assert_close, memory=memory)
  if timing.device() == 'cuda':
    for queries in (8192, 32_768, 131_072):
      large(table, queries, TAU, 'constant')
    large(table, 131_072, temperature.cosine(0.1, 0.2), 'cosine')
    print('\nRelative errors against float64, 2B = 4,096:')
    errors()


if __name__ == '__main__':
  main()
