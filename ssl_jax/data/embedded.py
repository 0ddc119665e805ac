"""The embedded set: eight shapes, drawn by formula, for a first run that needs no download.

An image's class is its shape. Position, size, rotation, colours, contrast sign, texture and clutter are drawn
independently of it, so that raw pixels say little about the class and an encoder has to learn invariance to see it.

The same seed gives the same bytes on any machine: numbers come from Philox's raw 64-bit stream, which NumPy keeps
stable, and only operations that IEEE 754 rounds correctly (+ − × ÷ √, min, max, floor) follow, one at a time, without
reductions.
"""

import numpy as np

CLASSES = ('disc', 'ring', 'triangle', 'square', 'star', 'cross', 'crescent', 'hourglass')
SIZES = {'train': 10_000, 'test': 2_000}
SIDE = 32
DOTS = 2  # clutter an image
STROKES = 1

# libm may differ in the last bit from machine to machine: nine decimals do not.
_COSINE = np.round(np.cos(np.arange(360) * (np.pi / 180)), 9).astype(np.float32)
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_PARAMETERS = 128  # 64-bit numbers an image for its parameters, and 128 more for a byte of noise at each pixel
_CHUNK = 50 * len(CLASSES)  # images drawn at once: whole rounds of the classes


def generate(split: str, seed: int = 0, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
  """Draws a split; a smaller `size` is a prefix of a larger one.  -> uint8 [N, 32, 32, 3], int32 [N]"""
  if split not in SIZES:
    raise ValueError(f'split={split!r} is not in the embedded set: use one of {", ".join(SIZES)}')
  size = SIZES[split] if size is None else size
  if size < 0:
    raise ValueError(f'size={size} is not a number of images: use 0 or more')
  if seed < 0:
    raise ValueError(f'seed={seed} cannot key the stream: use 0 or more')
  stream = np.random.Philox(key=np.array([seed, list(SIZES).index(split)], np.uint64))
  images = [_draw(stream, min(_CHUNK, size - start)) for start in range(0, size, _CHUNK)]
  images = np.concatenate([np.zeros((0, SIDE, SIDE, 3), np.uint8), *images])
  return images, (np.arange(size) % len(CLASSES)).astype(np.int32)


def _draw(stream, n):
  """The next n images of the stream; image i shows shape i mod 8.  -> uint8 [n, 32, 32, 3]"""
  raw = stream.random_raw(n * (_PARAMETERS + SIDE * SIDE // 8)).reshape(n, -1)
  draw = _Uniforms(raw[:, :_PARAMETERS])
  noise = raw[:, _PARAMETERS:].astype('<u8').view(np.uint8).reshape(n, SIDE, SIDE).astype(np.float32) / 127.5 - 1
  y, x = np.meshgrid(*[np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2] * 2, indexing='ij')  # pixels, centred
  x, y = x[None], y[None]

  # Background and foreground differ in lightness by `contrast`; either may be the lighter. Clutter lies between.
  dark, contrast, swap = draw(0.12, 0.42), draw(0.3, 0.46), draw() < 0.5
  light = dark + contrast
  lightness = dark + contrast * draw()
  behind = _paint(draw, np.where(swap, light, dark), x, y, noise)
  front = _paint(draw, np.where(swap, dark, light), x, y, noise)

  for _ in range(DOTS):
    a, b = x - draw(-16, 16), y - draw(-16, 16)
    behind = _blend(behind, _tint(draw, lightness + draw(-0.2, 0.2)), _coverage(_disc(a, b, draw(0.8, 1.8))))
  for _ in range(STROKES):
    (cosine, sine), a, b = draw.direction(), x - draw(-16, 16), y - draw(-16, 16)
    stroke = _box(cosine * a + sine * b, cosine * b - sine * a, draw(2, 6), draw(0.3, 0.7))
    behind = _blend(behind, _tint(draw, lightness + draw(-0.2, 0.2)), _coverage(stroke))

  # The shape in its own frame, where its radius is about 1.
  radius, (cosine, sine) = draw(8.5, 12.5), draw.direction()
  slack = SIDE / 2 - radius
  u, v = x - slack * draw(-1, 1), y - slack * draw(-1, 1)
  u, v = (cosine * u + sine * v) / radius, (cosine * v - sine * u) / radius
  distance = np.empty_like(u)
  for label, name in enumerate(CLASSES):
    rows = slice(label, None, len(CLASSES))
    distance[rows] = _SHAPES[name](u[rows], v[rows])
  image = _blend(behind, front, _coverage(distance * radius))
  return np.floor(np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


class _Uniforms:
  """Hands out the columns of a raw table as uniform numbers, [n, 1, 1], one an image."""

  def __init__(self, raw):
    self._columns = iter((raw.T >> np.uint64(40)).astype(np.float32) / np.float32(2**24))

  def __call__(self, low=0.0, high=1.0):
    return low + (high - low) * next(self._columns)[:, None, None]

  def direction(self):
    """Cosine and sine of a whole number of degrees."""
    degrees = self(0, 360).astype(np.int32)
    return _COSINE[degrees], _COSINE[(degrees + 270) % 360]


def _coverage(distance):
  """The part of a pixel that lies inside an outline, from its signed distance in pixels: antialiasing."""
  return np.clip(0.5 - distance, 0, 1)


def _blend(under, over, alpha):
  return under + alpha[..., None] * (over - under)


def _tint(draw, lightness):
  """A random tint of given luminance (before clipping).  [n, 1, 1] -> [n, 1, 1, 3]"""
  tint = np.stack([draw(-0.5, 0.5) for _ in range(3)], -1)
  red, green, blue = _LUMINANCE
  return lightness[..., None] + tint - (red * tint[..., :1] + green * tint[..., 1:2] + blue * tint[..., 2:])


def _paint(draw, lightness, x, y, noise):
  """A colour with a texture: plain, gradient, stripes, checks or noise.  -> [n, 32, 32, 3]"""
  kind, (cosine, sine), period = (draw() * 5).astype(np.int32), draw.direction(), draw(4, 10)
  along, across = cosine * x + sine * y, cosine * y - sine * x
  wave = lambda t: 4 * np.abs(t - np.floor(t) - 0.5) - 1  # a triangle wave of period 1
  stripes, checks = wave(along / period + draw()), wave(across / period + draw())
  texture = np.choose(kind, [np.zeros_like(along), along / 12, stripes, stripes * checks * 1.5, noise])
  return _tint(draw, lightness + draw(0.02, 0.05) * texture)


def _half_planes(x, y, normals_in_degrees, offset):
  """Distances to lines with the given outward normals, sorted.  -> [k, ...]"""
  return np.sort([_COSINE[d] * x + _COSINE[(d + 270) % 360] * y - offset for d in normals_in_degrees], axis=0)


def _disc(x, y, radius):
  return np.sqrt(x * x + y * y) - radius


def _box(x, y, half_width, half_height):
  return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


# Signed distances (negative inside, unit slope near the outline), y downwards, of a radius of about 1 (tips reach 1.2).
_SHAPES = {
  'disc': lambda x, y: _disc(x, y, 0.85),
  'ring': lambda x, y: np.abs(_disc(x, y, 0.72)) - 0.2,
  'triangle': lambda x, y: _half_planes(x, y, (90, 210, 330), 0.5)[-1],
  'square': lambda x, y: _box(x, y, 0.72, 0.72),
  # A five-pointed star is what lies inside at least four of five half-planes.
  'star': lambda x, y: _half_planes(x, y, (90, 162, 234, 306, 18), 0.36)[-2],
  'cross': lambda x, y: np.minimum(_box(x, y, 0.92, 0.28), _box(x, y, 0.28, 0.92)),
  'crescent': lambda x, y: np.maximum(_disc(x, y, 0.95), -_disc(x - 0.45, y, 0.75)),
  'hourglass': lambda x, y: np.maximum(np.abs(y) - 0.85, (np.abs(x) - np.abs(y) * 0.75 - 0.04) * 0.8),
}
