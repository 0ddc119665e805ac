"""A grid of images in one PNG file."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont

GAP = 2  # white pixels around each image
READABLE = 96  # approximate side, in pixels, to which small images are enlarged


def draw(
  rows: ArrayLike, path: str | os.PathLike, scale: int | None = None, labels: Sequence[str] = ()
) -> pathlib.Path:
  """Writes images [rows, columns, H, W, C] to a PNG file and returns its path.

  C is 1 or 3. Images are uint8, or floats that are clipped to [0, 1]. Each pixel becomes `scale` x `scale`; by default,
  small images are enlarged to about 96 pixels. `labels` are written to the left of the rows.
  """
  images = np.asarray(rows)
  if images.ndim != 5 or images.shape[-1] not in (1, 3) or 0 in images.shape:
    raise ValueError(f'rows: shape {images.shape}, expected [rows, columns, H, W, C] with C 1 or 3 and no empty axis')
  if images.dtype != np.uint8:
    images = np.round(255 * np.clip(np.nan_to_num(images), 0, 1)).astype(np.uint8)
  if scale is None:
    scale = max(1, round(READABLE / max(images.shape[2:4])))
  images = images.repeat(scale, axis=2).repeat(scale, axis=3)
  images = np.pad(images, ((0, 0), (0, 0), (GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255)
  grid = np.concatenate(np.concatenate(images, axis=1), axis=1)
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  sheet = Image.fromarray(np.broadcast_to(grid, (*grid.shape[:2], 3)))
  (_labeled(sheet, labels) if labels else sheet).save(path, format='PNG')
  return path


def _labeled(sheet: Image.Image, labels: Sequence[str]) -> Image.Image:
  """The sheet with the labels of the rows in a strip on its left."""
  measure, font = ImageDraw.Draw(sheet), _font()
  width = round(max(measure.multiline_textbbox((0, 0), label, font=font)[2] for label in labels)) + 4 * GAP
  wider = Image.new('RGB', (width + sheet.width, sheet.height), 'white')
  wider.paste(sheet, (width, 0))
  text = ImageDraw.Draw(wider)
  for row, label in enumerate(labels):
    text.multiline_text((2 * GAP, row * sheet.height / len(labels) + 2 * GAP), label, fill='black', font=font)
  return wider


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
  """Matplotlib's font, if it is installed: Pillow's has only the letters of English."""
  try:
    from matplotlib import font_manager
  except ImportError:
    return ImageFont.load_default()
  return ImageFont.truetype(font_manager.findfont('DejaVu Sans'), 10)


def enlarge(images: ArrayLike, size: int) -> np.ndarray:
  """Enlarges images by repeating pixels.  [N, h, h, C] -> [N, size, size, C]"""
  images = np.asarray(images)
  place = np.arange(size) * images.shape[1] // size
  return images[:, place][:, :, place]
