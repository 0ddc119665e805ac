"""The preset dystress_cifar as in data loaders, one image at a time. Loader workers import this, so it avoids jax."""

import math
import random
from collections.abc import Callable
from types import ModuleType

import numpy as np
from PIL import Image, ImageEnhance

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def pillow_view(image: Image.Image) -> np.ndarray:
  """The preset with Pillow, for one square image.  -> float32 [3, H, W]"""
  size, box = image.width, (0, 0, image.width, image.width)
  for _ in range(10):
    side, stretch = size * math.sqrt(random.uniform(0.08, 1.0)), (4 / 3) ** random.uniform(-0.5, 0.5)
    width, height = round(side * stretch), round(side / stretch)
    if width <= size and height <= size:
      left, top = random.randint(0, size - width), random.randint(0, size - height)
      box = (left, top, left + width, top + height)
      break
  image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
  if random.random() < 0.5:
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
  if random.random() < 0.8:
    for turn in random.sample(range(4), 4):
      if turn < 3:
        image = ENHANCERS[turn](image).enhance(random.uniform(0.6, 1.4))
      else:
        hue, *rest = image.convert('HSV').split()
        shift = np.uint8(round(random.uniform(-0.1, 0.1) * 255) % 256)
        image = Image.merge('HSV', (Image.fromarray(np.asarray(hue) + shift), *rest)).convert('RGB')
  if random.random() < 0.2:
    image = image.convert('L').convert('RGB')
  return ((np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)).transpose(2, 0, 1)


def torchvision_view(module: ModuleType, convert: Callable) -> Callable:
  """The preset with torchvision.transforms or torchvision.transforms.v2."""
  jitter = module.RandomApply([module.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
  steps = [module.RandomResizedCrop(32), module.RandomHorizontalFlip(), jitter, module.RandomGrayscale(0.2), convert]
  return module.Compose([*steps, module.Normalize(MEAN, STD)])
