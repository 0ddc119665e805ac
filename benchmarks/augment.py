"""Two SimCLR views (dystress_cifar) of a batch of 32-pixel images: ours, and those of data loaders.

  python -m benchmarks.augment [--quick]

Pillow and torchvision on Pillow images process one image at a time in one process, like one worker of a data loader.
torchvision v2 on a batch draws one crop, one flip and one jitter for the whole batch. This is a different augmentation,
shown only for its speed.
"""

import functools
import random
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks import timing
from benchmarks.image_peers import pillow_view, torchvision_view
from ssl_jax.data import augment, embedded
from ssl_jax.run.update import example_keys, make_views

PRESET = augment.PRESETS['dystress_cifar']


@jax.jit
def ours(step: int, images: jax.Array) -> tuple[jax.Array, ...]:
  keys = example_keys(0, step, jnp.arange(len(images)))
  return make_views([augment.make(PRESET)] * 2, keys, images)


def loader(view: Callable, images: np.ndarray) -> tuple[np.ndarray, ...]:
  """Two views of each image, made one at a time, in the form that `ours` returns."""
  views = [[np.asarray(view(image)) for image in map(Image.fromarray, images)] for _ in range(2)]
  return tuple(np.stack(v).transpose(0, 2, 3, 1) for v in views)


def assert_same_distribution(mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
  """Compares the mean view and the second color moments of 4,000 views of one image, up to noise and 8-bit rounding.

  This detects a flip, crop, grayscale, hue or brightness change that one side lacks or draws from half the range.
  """
  mine, theirs = (np.concatenate(x) for x in (mine, theirs))
  moments = [np.einsum('nhwc,nhwd->cd', x, x) / x[..., 0].size for x in (mine, theirs)]
  np.testing.assert_allclose(theirs.mean(0), mine.mean(0), atol=0.12)
  np.testing.assert_allclose(moments[1], moments[0], atol=0.15)


def main() -> None:
  quick = timing.arguments(__doc__).quick
  timing.compile_as_main()
  torch, vision = timing.torch, timing.optional('torchvision.transforms')
  views = {'Pillow, one process': pillow_view}
  if vision:
    views['torchvision on Pillow images, one process'] = torchvision_view(vision, vision.ToTensor())
  one = np.repeat(embedded.generate('train', size=3)[0][2:], 2000, axis=0)
  random.seed(0)
  for view in views.values():
    assert_same_distribution(ours(0, one), loader(view, one))
  table = timing.Table(__doc__, quick, 'images')
  for batch in (128, 512) if quick else (128, 1024):
    images = embedded.generate('train', size=batch)[0]
    on_device = jax.device_put(images)
    calls = {'ssl_jax, jitted batch': functools.partial(ours, 0, on_device)}
    calls |= {name: functools.partial(loader, view, images) for name, view in views.items()}
    if vision and timing.torch_runs():
      v2 = timing.optional('torchvision.transforms.v2')
      view = torchvision_view(v2, v2.ToDtype(torch.float32, scale=True))
      channels_first = torch.tensor(images.transpose(0, 3, 1, 2), device=timing.device())
      calls['torchvision v2, one draw for the batch'] = lambda v=view, x=channels_first: (v(x), v(x))
    else:
      calls['torchvision'] = 'torchvision is not installed, or torch does not support this device'
    table.compare(f'batch {batch}', calls, items=batch)


if __name__ == '__main__':
  main()
