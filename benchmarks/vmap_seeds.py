"""Is it worth training several seeds at once, with vmap over the update, instead of one after the other?

  python -m benchmarks.vmap_seeds [--quick]

Images per second are those of all seeds together. In both cases, each seed has its own weights, data order and
augmentation. vmap over the weights turns a convolution into a grouped convolution. bfloat16 on a GPU, float32 on a CPU;
`--quick` is for a CPU.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import simclr, timing
from ssl_jax.run.state import State
from ssl_jax.run.update import scan_update


def one_by_one(run: Callable, states: Sequence[State], dataset: jax.Array, index: jax.Array) -> Callable:
  """-> a function that makes the updates of one seed after the other"""
  states = list(states)

  def call():
    metrics = []
    for seed in range(len(states)):
      states[seed], row = run(seed, states[seed], dataset, index[seed])
      metrics.append(row)
    return metrics

  return call


def at_once(run: Callable, states: Sequence[State], dataset: jax.Array, index: jax.Array) -> Callable:
  """-> a function that makes the same updates for all seeds together"""
  seeds, states = jnp.arange(len(states)), jax.tree.map(lambda *x: jnp.stack(x), *states)

  def call():
    nonlocal states
    states, metrics = run(seeds, states, dataset, index)
    return metrics

  return call


def assert_same_first_step(turns: Sequence[Mapping], together: Mapping) -> None:
  """Compares loss and gradient norm of each seed at the first step; later steps diverge through rounding."""
  for name in ('loss', 'grad_norm'):
    one = np.stack([np.ravel(metrics[name])[0] for metrics in turns])
    many = np.asarray(together[name]).reshape(len(turns), -1)[:, 0]
    timing.assert_close(one, many, 2e-2 if timing.device() == 'cuda' else 1e-3)


def main() -> None:
  quick = timing.arguments(__doc__).quick
  timing.compile_as_main()
  steps = 50 if timing.device() == 'cuda' else 1  # per call; on a CPU, steps are dispatched one by one
  batch, width = (8, 8) if quick else (128, 64)
  encoders = {'resnet18_cifar': (f'model.width={width}',)}
  encoders['alexnet_small'] = ('model.name=alexnet_small', 'projector.name=alexnet')
  dataset = jax.device_put(simclr.random_images(10_000))
  table = timing.Table(__doc__, quick, 'images', ratio='vmap / in turn')
  for encoder, options in encoders.items():
    _, init, update = simclr.parts(simclr.config_of(f'batch_size={batch}', *options))
    run = lambda seed, *rest, update=update: scan_update(update(seed))(*rest)
    one = jax.jit(run, donate_argnums=1)
    many = jax.jit(jax.vmap(run, in_axes=(0, 0, None, 0)), donate_argnums=1)
    for number in (1, 2):
      index = np.random.default_rng(0).integers(len(dataset), size=(number, batch, steps), dtype=np.int32)
      arguments = ([init(seed) for seed in range(number)], dataset, jax.device_put(index))
      calls = {'in turn': one_by_one(one, *arguments), 'vmap': at_once(many, *arguments)}
      table.compare(f'{encoder}, S = {number}', calls, same=assert_same_first_step, items=number * batch * steps)


if __name__ == '__main__':
  main()
