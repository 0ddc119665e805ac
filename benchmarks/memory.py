"""Memory of a gradient, with all intermediates kept and with some recomputed. Compiles only, runs nothing.

python -m benchmarks.memory [--quick]
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import timing
from configs import imagenet
from ssl_jax import losses, methods, models

# XLA's CPU compiler detects that recomputed values already exist, and keeps them. Without this pass, it behaves like
# the compilers for accelerators.
OPTIONS = {'cpu': {'xla_disable_hlo_passes': 'cse_barrier_expander'}}


def temporary(function: Callable, *args) -> float:
  """MiB that the compiled function needs in addition to its arguments and results."""
  compiled = jax.jit(function).lower(*args).compile(OPTIONS.get(timing.device()))
  return compiled.memory_analysis().temp_size_in_bytes / 2**20


def nt_xent(queries: int, block: int) -> float:
  """MiB of the gradient of NT-Xent."""
  z = jax.ShapeDtypeStruct((queries // 2, 128), jnp.float32)
  return temporary(jax.grad(lambda z1, z2: losses.nt_xent(z1, z2, 0.2, block=block).mean(), argnums=(0, 1)), z, z)


def encoder(name: str, size: int, batch: int, remat: bool) -> float:
  """MiB of the gradient of an encoder."""
  module = models.create(name, remat=remat)
  images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
  variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=True), images)

  def gradients(variables, images):
    def loss(params):
      features, changed = module.apply({**variables, 'params': params}, images, train=True, mutable=['batch_stats'])
      return jnp.mean(features**2), changed

    return jax.grad(loss, has_aux=True)(variables['params'])

  return temporary(gradients, variables, images)


def simclr(name: str, size: int, batch: int, microbatches: int) -> float:
  """MiB of the gradient of SimCLR with NT-Xent over the whole batch, in float32."""
  options = [f'model.name={name}', f'data.image_size={size}', f'batch_size={batch}', 'dtype=float32']
  config = imagenet.get_config(','.join([*options, f'method.microbatches={microbatches}']))
  method = methods.create(config, steps_per_epoch=1, total_steps=1)
  view = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
  params, batch_stats, extra = jax.eval_shape(method.init, jax.random.key(0), view)

  def loss(params, batch_stats, views):
    inputs = methods.Inputs(views, jnp.arange(batch), jnp.zeros((), jnp.int32), jax.random.key(0))
    value, outputs = method.loss(params, batch_stats, extra, inputs)
    return value, outputs.batch_stats

  return temporary(jax.grad(loss, has_aux=True), params, batch_stats, (view, view))


def main() -> None:
  quick = timing.arguments(__doc__).quick
  timing.compile_as_main()
  print(f'{jax.devices()[0].device_kind}, jax {jax.__version__}, float32\n')
  print('| case | MiB | with | MiB | share |\n|---|---|---|---|---|')
  for queries, block in ((4096, 256),) if quick else ((4096, 256), (65536, 1024)):
    row(f'NT-Xent, 2B = {queries:,}', nt_xent(queries, 0), f'block={block}', nt_xent(queries, block))
  for name, size, batch in (('resnet18', 64, 32),) if quick else (('resnet50', 224, 32), ('vit_s16', 224, 32)):
    sizes = [encoder(name, size, batch, remat) for remat in (False, True)]
    row(f'{name}, {batch} images of {size} px', sizes[0], 'remat=True', sizes[1])
  for name, size, batch, parts in (('resnet18', 64, 32, 4),) if quick else (('resnet50', 224, 64, 8),):
    sizes = [simclr(name, size, batch, number) for number in (1, parts)]
    row(f'SimCLR, {name}, {batch} pairs of {size} px', sizes[0], f'microbatches={parts}', sizes[1])


def row(case: str, whole: float, change: str, less: float) -> None:
  share = less / whole
  print(f'| {case} | {whole:,.1f} | `{change}` | {less:,.1f} | {share:.{0 if share > 0.01 else 1}%} |', flush=True)


if __name__ == '__main__':
  main()
