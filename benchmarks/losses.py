"""NT-Xent forward and backward: ours (dense and in blocks), optax's, and the usual torch code.

python -m benchmarks.losses [--quick]
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import timing
from benchmarks.timing import torch
from ssl_jax import losses

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


def main() -> None:
  quick = timing.arguments(__doc__).quick
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


if __name__ == '__main__':
  main()
