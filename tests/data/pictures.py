"""Pictures, and the operations on them, for the tests of augmentations."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from ssl_jax.data import image_ops
from tests.helpers import REAL, needs_real_data


def picture(height=40, width=48, seed=0):
  """A uint8 picture with smooth regions, edges, saturated and grey pixels, and noise."""
  rng = np.random.default_rng(seed)
  smooth = scipy.ndimage.gaussian_filter(rng.standard_normal((height, width, 3)), (5, 5, 0)) * 6 + 0.5
  smooth[: height // 4] = np.round(smooth[: height // 4])
  smooth[:, : width // 6] = smooth[:, : width // 6, :1]
  return np.round(255 * np.clip(smooth + 0.05 * rng.standard_normal(smooth.shape), 0, 1)).astype(np.uint8)


def photographs():
  """Two real photographs of different shapes, as PIL images."""
  paths = sorted((pathlib.Path(REAL) / 'imagewoof' / 'val').glob('*/*.JPEG'))
  return [Image.open(path).convert('RGB') for path in (paths[0], paths[-1])]


def images():
  """Parametrizes a test by the pictures on which Pillow is compared."""
  return pytest.mark.parametrize('source', ['synthetic', pytest.param('photograph', marks=needs_real_data)])


def load(source):
  if source == 'synthetic':
    return picture()
  photograph = photographs()[0]
  return np.asarray(photograph.crop((60, 50, 60 + 48, 50 + 40)))


def to_float(array):
  return jnp.asarray(array, jnp.float32) / 255


def levels(image):
  """In units of 8-bit levels, to which Pillow rounds after each operation."""
  return np.asarray(image, np.float64) * 255


@functools.cache
def kernel(name):
  return jax.jit(getattr(image_ops, name), static_argnames=('size', 'interpolation') if 'crop' in name else ())
