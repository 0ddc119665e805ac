"""What more positives cost: a training step of CACR and of other losses, in time and memory (CACR, Tables 14 and 17).

  python -m benchmarks.positives --table=14    # on a GPU: the paper's networks and batches
  python -m benchmarks.positives --table=17
  python -m benchmarks.positives --quick       # on a CPU: both tables with smaller networks, as a smoke test

Table 14: the small AlexNet on 32 pixels, batch 128, K = 1, 2, 4, 6, 8 and 10. Table 17: MoCo v2 with a ResNet-50 on 224
pixels, a queue of 65,536 and the batch of each method; `--methods=all` measures all eight methods instead of three, but
each ResNet-50 takes long to compile. The paper's times are for a Tesla V100. Those of Table 14 are so short that they
may be for the loss alone, so this benchmark measures both for Table 14: the loss on precomputed embeddings, and the
whole step with its views, forward, backward and update. Everything is compiled beforehand, so the first call includes
no compilation.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import simclr, timing
from ssl_jax import config, methods, pairs
from ssl_jax.registry import require_choice

QUICK_RESNET = ('model.width=4', 'model.stage_sizes=(1,1)', 'data.image_size=32', 'method.queue=256')
POSITIVES = (1, 2, 4, 6, 8, 10)
# Table 17: (name, option of configs/imagenet.py, views, batch).
METHODS = (
  ('CL', 'moco', 2, 256),
  ('AU-CL', 'align_uniform_moco', 2, 256),
  ('HN-CL', 'hard_negative_moco', 2, 256),
  ('CACR, K = 1', 'cacr_moco_k1', 2, 256),
  ('CL, K = 4', 'cmc_moco', 5, 64),
  ('CACR, K = 2', 'cacr_moco', 3, 128),
  ('CACR, K = 3', 'cacr_moco', 4, 64),
  ('CACR, K = 4', 'cacr_moco', 5, 64),
)
FEW = ('CL', 'CACR, K = 1', 'CACR, K = 4')


def step(path: str, *overrides: str) -> tuple[Callable, tuple]:
  """(a jitted training step, its arguments) of a config on random images"""
  chosen = config.load(path, overrides)
  _, init, update = simclr.parts(chosen)
  size, batch = chosen.data.image_size, chosen.batch_size
  images = np.random.default_rng(0).integers(256, size=(batch, size, size, 3), dtype=np.uint8)
  return jax.jit(update(0)), (init(0), jnp.asarray(images), jnp.arange(batch))


def loss(path: str, *overrides: str) -> tuple[Callable, tuple]:
  """Like `step`, for the gradient of the loss on precomputed embeddings."""
  chosen = config.load(path, overrides)
  contrast = methods.parts(chosen).contrast
  views = [jax.random.normal(jax.random.key(v), (chosen.batch_size, 128)) for v in range(chosen.views)]
  count = len(views) * (len(views) - 1) // 2

  def value(views):
    pos, neg, where = pairs.by_view_pair(*views)
    return jnp.mean(contrast(pos, neg, where=where, view_pairs=count))

  return jax.jit(jax.grad(value)), (views,)


def main() -> None:
  args = timing.arguments(__doc__, table=14, methods='few')
  require_choice('--methods', args.methods, ('few', 'all'))
  timing.compile_as_main()
  table = timing.Table(__doc__, args.quick, ratio='K / K = 1')
  if args.table == 14 or args.quick:
    table14(table, args.quick)
  if args.table == 17 or args.quick:
    table17(table, args.quick, [row for row in METHODS if args.methods == 'all' or row[0] in FEW])


def table14(table: timing.Table, quick: bool) -> None:
  small = ('batch_size=16',) if quick else ()
  for title, make in (('loss', loss), ('step', step)):
    of = {f'K = {k}': ('configs/cifar10.py:cacr', f'views={k + 1}', *small) for k in POSITIVES[: 3 if quick else None]}
    measure(table, f'Table 14, {title}', make, of)


def table17(table: timing.Table, quick: bool, chosen: Sequence[tuple[str, str, int, int]]) -> None:
  of = {}
  for name, option, views, batch in chosen:
    sizes = (f'batch_size={batch // 16}', *QUICK_RESNET) if quick else (f'batch_size={batch}',)
    of[name] = (f'configs/imagenet.py:{option}', f'views={views}', *sizes)
  measure(table, 'Table 17, step', step, of)


def measure(table: timing.Table, case: str, make: Callable, of: dict[str, tuple[str, ...]]) -> None:
  """A row per entry: seconds of a call, MiB in addition to the arguments, ratio to the first entry.

  All programs are compiled in parallel before the first call, since one compilation leaves most CPU cores idle.
  """

  def compiled(arguments):
    program, given = make(*arguments)
    return program, given, timing.jax_memory(program, *given)

  with futures.ThreadPoolExecutor(len(of)) as pool:
    programs = dict(zip(of, pool.map(compiled, of.values()), strict=True))
  calls = {name: functools.partial(program, *given) for name, (program, given, _) in programs.items()}
  table.compare(case, calls, memory=lambda name: programs[name][2])


if __name__ == '__main__':
  main()
