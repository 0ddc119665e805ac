"""The embedded dataset: generated images of eight shapes, for a first run without a download.

The class of an image is its shape. Position, size, rotation, colors, sign of the contrast, texture and clutter are
independent of the class. Raw pixels therefore say little about the class, and an encoder has to learn invariances.

The same seed gives the same bytes on every machine. Random numbers come from the raw 64-bit stream of Philox, which
NumPy keeps stable. They are processed only with operations that IEEE 754 rounds correctly (+ − × ÷ √, min, max, floor),
one at a time and without reductions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ssl_jax.registry import require, require_choice

CLASSES = ('disc', 'ring', 'triangle', 'square', 'star', 'cross', 'crescent', 'hourglass')
SIZES = {'train': 10_000, 'test': 2_000}
SIDE = 32
DOTS = 2  # clutter: dots per image
STROKES = 1  # clutter: strokes per image

# The last bit of a cosine depends on the machine. The first nine decimals do not.
_COSINE = np.round(np.cos(np.arange(360) * (np.pi / 180)), 9).astype(np.float32)
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_PARAMETERS = 128  # 64-bit random numbers per image for its parameters; 128 more give one byte of noise per pixel
_CHUNK = 50 * len(CLASSES)  # images drawn at once, a multiple of the number of classes


class Scenes(NamedTuple):
  """Images, with the attributes that generated them."""

  images: np.ndarray  # uint8 [N, 32, 32, 3]
  labels: np.ndarray  # int32 [N], the shape
  color: np.ndarray  # float32 [N, 3], the mean color of the shape
  background: np.ndarray  # float32 [N, 3], the mean color behind it
  place: np.ndarray  # float32 [N, 2], the center of the shape: pixels to the right of and below the image's center


def generate(split: str, seed: int = 0, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
  """Images uint8 [N, 32, 32, 3] and labels int32 [N] of a split. `size` selects the first images."""
  return scenes(split, seed, size)[:2]


def scenes(split: str, seed: int = 0, size: int | None = None) -> Scenes:
  """The images and labels of `generate`, with the attributes that `ssl_jax.data.embedded_captions` describes."""
  require_choice('split', split, SIZES)
  size = SIZES[split] if size is None else size
  require('size', size, lambda x: x >= 0, 'at least 0')
  require('seed', seed, lambda x: x >= 0, 'at least 0')
  stream = np.random.Philox(key=np.array([seed, list(SIZES).index(split)], np.uint64))
  empty = (np.zeros((0, SIDE, SIDE, 3), np.uint8), *(np.zeros((0, n), np.float32) for n in (3, 3, 2)))
  parts = [empty, *(_draw(stream, min(_CHUNK, size - start)) for start in range(0, size, _CHUNK))]
  images, *facts = (np.concatenate(part) for part in zip(*parts, strict=True))
  return Scenes(images, (np.arange(size) % len(CLASSES)).astype(np.int32), *facts)


def _draw(stream: np.random.Philox, n: int) -> tuple[np.ndarray, ...]:
  """Generates the next n images; image i shows shape i mod 8.  -> the fields of `Scenes`, without labels"""
  raw = stream.random_raw(n * (_PARAMETERS + SIDE * SIDE // 8)).reshape(n, -1)
  draw = _Uniforms(raw[:, :_PARAMETERS])
  noise = raw[:, _PARAMETERS:].astype('<u8').view(np.uint8).reshape(n, SIDE, SIDE).astype(np.float32) / 127.5 - 1
  y, x = np.meshgrid(*[np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2] * 2, indexing='ij')  # from the center
  x, y = x[None], y[None]

  # Background and foreground differ in lightness by `contrast`, with a random sign. Clutter is between them, ± 0.2.
  dark, contrast, swap = draw(0.12, 0.42), draw(0.3, 0.46), draw() < 0.5
  light = dark + contrast
  lightness = dark + contrast * draw()
  behind, background = _paint(draw, np.where(swap, light, dark), x, y, noise)
  front, color = _paint(draw, np.where(swap, dark, light), x, y, noise)

  for _ in range(DOTS):
    a, b = x - draw(-16, 16), y - draw(-16, 16)
    behind = _blend(behind, _tint(draw, lightness + draw(-0.2, 0.2)), _coverage(_disc(a, b, draw(0.8, 1.8))))
  for _ in range(STROKES):
    (cosine, sine), a, b = draw.direction(), x - draw(-16, 16), y - draw(-16, 16)
    stroke = _box(cosine * a + sine * b, cosine * b - sine * a, draw(2, 6), draw(0.3, 0.7))
    behind = _blend(behind, _tint(draw, lightness + draw(-0.2, 0.2)), _coverage(stroke))

  # Coordinates in which the shape has a radius of about 1.
  radius, (cosine, sine) = draw(8.5, 12.5), draw.direction()
  slack = SIDE / 2 - radius
  right, below = slack * draw(-1, 1), slack * draw(-1, 1)
  u, v = x - right, y - below
  u, v = (cosine * u + sine * v) / radius, (cosine * v - sine * u) / radius
  distance = np.empty_like(u)
  for label, name in enumerate(CLASSES):
    rows = slice(label, None, len(CLASSES))
    distance[rows] = _SHAPES[name](u[rows], v[rows])
  image = _blend(behind, front, _coverage(distance * radius))
  place = np.concatenate([right, below], axis=1)[..., 0]
  return np.floor(np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8), color, background, place


class _Uniforms:
  """Each call converts the next column of a table of raw numbers to uniform numbers, one per image.  [n, 1, 1]"""

  def __init__(self, raw: np.ndarray):
    self._columns = iter((raw.T >> np.uint64(40)).astype(np.float32) / np.float32(2**24))

  def __call__(self, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    return low + (high - low) * next(self._columns)[:, None, None]

  def direction(self) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of a random angle in whole degrees."""
    degrees = self(0, 360).astype(np.int32)
    return _COSINE[degrees], _COSINE[(degrees + 270) % 360]


def _coverage(distance: np.ndarray) -> np.ndarray:
  """The approximate fraction of a pixel inside an outline, from the signed distance in pixels, for antialiasing."""
  return np.clip(0.5 - distance, 0, 1)


def _blend(under: np.ndarray, over: np.ndarray, alpha: np.ndarray) -> np.ndarray:
  return under + alpha[..., None] * (over - under)


def _tint(draw: _Uniforms, lightness: np.ndarray) -> np.ndarray:
  """A random color of the given luminance, before clipping.  [n, 1, 1] -> [n, 1, 1, 3]"""
  return _colored(lightness, np.stack([draw(-0.5, 0.5) for _ in range(3)], -1))


def _colored(lightness: np.ndarray, tint: np.ndarray) -> np.ndarray:
  red, green, blue = _LUMINANCE
  return lightness[..., None] + tint - (red * tint[..., :1] + green * tint[..., 1:2] + blue * tint[..., 2:])


def _paint(
  draw: _Uniforms, lightness: np.ndarray, x: np.ndarray, y: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """A random color, textured (plain, gradient, stripes, checks, noise) and plain.  -> [n, 32, 32, 3], [n, 3]"""
  kind, (cosine, sine), period = (draw() * 5).astype(np.int32), draw.direction(), draw(4, 10)
  along, across = cosine * x + sine * y, cosine * y - sine * x
  wave = lambda t: 4 * np.abs(t - np.floor(t) - 0.5) - 1  # a triangle wave of period 1
  stripes, checks = wave(along / period + draw()), wave(across / period + draw())
  texture = np.choose(kind, [np.zeros_like(along), along / 12, stripes, stripes * checks * 1.5, noise])
  textured = lightness + draw(0.02, 0.05) * texture
  tint = np.stack([draw(-0.5, 0.5) for _ in range(3)], -1)
  return _colored(textured, tint), np.clip(_colored(lightness, tint), 0, 1)[:, 0, 0]


def _half_planes(x: np.ndarray, y: np.ndarray, normals_in_degrees: Sequence[int], offset: float) -> np.ndarray:
  """Sorted signed distances to lines with the given outward normals.  -> [k, ...]"""
  return np.sort([_COSINE[d] * x + _COSINE[(d + 270) % 360] * y - offset for d in normals_in_degrees], axis=0)


def _disc(x: np.ndarray, y: np.ndarray, radius: float | np.ndarray) -> np.ndarray:
  return np.sqrt(x * x + y * y) - radius


def _box(x: np.ndarray, y: np.ndarray, half_width: float | np.ndarray, half_height: float | np.ndarray) -> np.ndarray:
  return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


# Signed distances of shapes with a radius of about 1 (tips reach 1.2): negative inside, unit slope near the outline.
# The y axis points down.
_SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
  'disc': lambda x, y: _disc(x, y, 0.85),
  'ring': lambda x, y: np.abs(_disc(x, y, 0.72)) - 0.2,
  'triangle': lambda x, y: _half_planes(x, y, (90, 210, 330), 0.5)[-1],
  'square': lambda x, y: _box(x, y, 0.72, 0.72),
  # A five-pointed star is the set of points inside at least four of five half-planes.
  'star': lambda x, y: _half_planes(x, y, (90, 162, 234, 306, 18), 0.36)[-2],
  'cross': lambda x, y: np.minimum(_box(x, y, 0.92, 0.28), _box(x, y, 0.28, 0.92)),
  'crescent': lambda x, y: np.maximum(_disc(x, y, 0.95), -_disc(x - 0.45, y, 0.75)),
  'hourglass': lambda x, y: np.maximum(np.abs(y) - 0.85, (np.abs(x) - np.abs(y) * 0.75 - 0.04) * 0.8),
}
