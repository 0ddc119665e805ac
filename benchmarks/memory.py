"""Memory of a gradient, with everything kept and with parts computed again. It is compiled and not run.

python -m benchmarks.memory [--quick]
"""

import jax
import jax.numpy as jnp

from benchmarks import timing
from ssl_jax import losses, models

# XLA's CPU compiler finds that what is to be computed again is there already, and keeps it; without this pass it does
# what compilers for accelerators do.
OPTIONS = {'cpu': {'xla_disable_hlo_passes': 'cse_barrier_expander'}}


def temporary(function, *args) -> float:
  """MiB that the compiled function needs beside its arguments and results."""
  compiled = jax.jit(function).lower(*args).compile(OPTIONS.get(timing.device()))
  return compiled.memory_analysis().temp_size_in_bytes / 2**20


def nt_xent(queries, block):
  z = jax.ShapeDtypeStruct((queries // 2, 128), jnp.float32)
  return temporary(jax.grad(lambda z1, z2: losses.nt_xent(z1, z2, 0.2, block=block).mean(), argnums=(0, 1)), z, z)


def encoder(name, size, batch, remat):
  module = models.create(name, remat=remat)
  images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
  variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=True), images)

  def gradients(variables, images):
    def loss(params):
      features, changed = module.apply({**variables, 'params': params}, images, train=True, mutable=['batch_stats'])
      return jnp.mean(features**2), changed

    return jax.grad(loss, has_aux=True)(variables['params'])

  return temporary(gradients, variables, images)


def main():
  quick = timing.arguments(__doc__).quick
  print(f'{jax.devices()[0].device_kind}, jax {jax.__version__}, float32\n')
  print('| case | MiB | with | MiB | share |\n|---|---|---|---|---|')
  for queries, block in ((4096, 256),) if quick else ((4096, 256), (65536, 1024)):
    row(f'NT-Xent, 2B = {queries:,}', nt_xent(queries, 0), f'block={block}', nt_xent(queries, block))
  for name, size, batch in (('resnet18', 64, 32),) if quick else (('resnet50', 224, 32), ('vit_s16', 224, 32)):
    sizes = [encoder(name, size, batch, remat) for remat in (False, True)]
    row(f'{name}, {batch} images of {size} px', sizes[0], 'remat=True', sizes[1])


def row(case, whole, change, less):
  print(f'| {case} | {whole:,.1f} | `{change}` | {less:,.1f} | {less / whole:.0%} |', flush=True)


if __name__ == '__main__':
  main()
