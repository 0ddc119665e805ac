"""A whole SimCLR step: two views, ResNet-18 (CIFAR stem) and projector forward and backward, NT-Xent, SGD.

  python -m benchmarks.train_step [--quick] [--batch=128] [--workers=16]
  python -m benchmarks.train_step --peers=compile    # torch.compile, separately because it is slow to compile
  python -m benchmarks.train_step --model=resnet50 --batch=256 --peers=torch    # 224 pixels, torchvision's ResNet-50

Ours augments within the step, on the device. Torch is timed on views that are already on the device, which favors it,
and on views from the workers of a data loader, as in practice. bfloat16 on a GPU, float32 on a CPU.
If lightly is installed, its transform, loss and head are also timed, in the same loop.
`--quick` is for a CPU: an eighth of ResNet-18's width, a small batch, a loader without workers.
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import image_peers, simclr, timing
from benchmarks.timing import torch
from ssl_jax.data import embedded
from ssl_jax.methods import Inputs
from ssl_jax.registry import require_choice
from ssl_jax.run.devices import AXIS, Devices
from ssl_jax.run.update import scan_update

torch_peers = timing.optional('benchmarks.torch_peers')
SIZES = {'resnet18_cifar': 32, 'resnet50': 224}  # model -> pixels


def ours(config: ConfigDict, images: np.ndarray, steps: int) -> Callable:
  """-> a function that makes `steps` updates on one device, with the same mapping as in training"""
  devices = Devices.choose(config.parallel.map, 1)
  _, init, update = simclr.parts(config, AXIS)
  run = devices.map(scan_update(update(config.seed)), replicated=2, sharded=1, donate=(0,))
  state, dataset = devices.replicate(jax.device_get(init(config.seed))), devices.replicate(images)
  index = devices.shard(np.arange(config.batch_size * steps, dtype=np.int32).reshape(-1, steps) % len(images))

  def call():
    nonlocal state
    state, metrics = run(state, dataset, index)
    return metrics

  return call


def assert_same_step() -> None:
  """Compares loss and gradients for equal weights and views, in float64: float32 rounding can flip a ReLU."""
  config = simclr.config_of('model.width=8', 'batch_size=16', 'dtype=float64')
  method, init, _ = simclr.parts(config)
  state = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float64)), init(0))
  views = embedded.generate('train', size=32)[0].reshape(2, 16, 32, 32, 3) / 128 - 1
  inputs = Inputs(tuple(map(jnp.asarray, views)), jnp.arange(16), jnp.asarray(0), jax.random.key(0))
  loss = lambda params: method.loss(params, state.batch_stats, {}, inputs)[0]
  network = torch_peers.network(8).double()
  network.load_state_dict(torch_peers.named(state.params['network']), strict=False)
  z = network(torch.tensor(views).flatten(0, 1).movedim(3, 1))
  expected = torch_peers.nt_xent(*z.chunk(2), config.temperature.tau)
  expected.backward()
  value, gradients = jax.jit(jax.value_and_grad(loss))(state.params)
  theirs = {name: p.grad for name, p in network.named_parameters()}
  timing.assert_close((value, torch_peers.named(gradients['network'])), (expected, theirs), 1e-6)


def peers(names: list[str], config: ConfigDict, images: np.ndarray, steps: int, workers: int) -> dict:
  """Title -> a function that makes `steps` updates, or the reason why there is none."""
  width, batch = config.model.width, config.batch_size
  vision = timing.optional('torchvision.transforms')
  view = image_peers.torchvision_view(vision, vision.ToTensor()) if vision else image_peers.pillow_view
  small = config.model.name == 'resnet18_cifar'
  network = lambda: torch_peers.network(width) if small else torch_peers.resnet50()
  trainer = lambda *args, **kwargs: torch_peers.trainer(config, network(), *args, **kwargs)
  ready = lambda: torch_peers.ready(batch, steps, config.data.image_size)
  known = {
    'torch': ('torch, views ready', lambda: trainer(ready())),
    'compile': ('torch.compile, views ready', lambda: trainer(ready(), compile=True)),
  }
  if small:
    known |= {
      'loader': (
        f'torch, {workers} workers, {"torchvision" if vision else "Pillow"} views',
        lambda: trainer(torch_peers.loader(images, view, batch, workers)),
      ),
      'lightly': (
        f'lightly, {workers} workers',
        lambda: torch_peers.lightly_trainer(config, width, images, batch, workers),
      ),
    }
  found = {}
  for name in names:
    require_choice('--peers', name, known)
    title, make = known[name]
    if not timing.torch_runs():
      found[title] = timing.WITHOUT_TORCH
    elif not timing.optional(needed := 'lightly' if name == 'lightly' else 'torch' if small else 'torchvision'):
      found[title] = f'{needed} is not installed'
    else:
      found[title] = make()
  return found


def main() -> None:
  args = timing.arguments(
    __doc__, model='resnet18_cifar', batch=128, workers=os.cpu_count(), peers='torch,loader,lightly'
  )
  require_choice('--model', args.model, SIZES)
  timing.compile_as_main()
  steps = 25 if timing.device() == 'cuda' else 1  # per call; on a CPU, steps are dispatched one by one
  width, batch, workers = (8, 32, 0) if args.quick else (64, args.batch, args.workers)
  if timing.torch_runs():
    with jax.enable_x64(True):
      assert_same_step()
  table = timing.Table(__doc__, args.quick, 'images', rounds=5)
  size = SIZES[args.model]
  config = simclr.config_of(
    f'batch_size={batch}', f'model.width={width}', f'model.name={args.model}', f'data.image_size={size}'
  )
  images = simclr.random_images(steps * batch if size > 32 else max(10_000, steps * batch), size)
  calls = {'ssl_jax, views made in the step': ours(config, images, steps)}
  calls |= peers(args.peers.split(',') if args.peers else [], config, images[: steps * batch], steps, workers)
  name = '' if args.model == 'resnet18_cifar' else f'{args.model}, '
  table.compare(f'{name}{config.dtype}, batch {batch}', calls, items=steps * batch)


if __name__ == '__main__':
  main()
