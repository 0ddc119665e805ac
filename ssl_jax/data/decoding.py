"""Image files: opened only in known formats and sizes, decoded to RGB."""

import io

import numpy as np
from PIL import Image

# Accepted formats, detected from the content, not from the file name. Pillow reads some JPEG files as MPO. EPS is
# excluded, because Pillow would run Ghostscript.
FORMATS = ('BMP', 'GIF', 'JPEG', 'PNG', 'WEBP')
LARGEST_IMAGE = 2**30  # maximum bytes of one image file


def check_size(size: int) -> None:
  """Raises an OSError if an image of `size` bytes is too large to be read."""
  if size > LARGEST_IMAGE:
    raise OSError(f'it has {size / 2**30:,.0f} GiB')


def open_image(content: bytes) -> Image.Image:
  """The image in the content of a file, not yet decoded."""
  check_size(len(content))
  return Image.open(io.BytesIO(content), formats=FORMATS)


def rgb(image: Image.Image) -> Image.Image:
  """The decoded image in RGB, 8 bits per channel."""
  if image.mode.startswith('I'):  # 16-bit grayscale, which Pillow would clip at 255
    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
  elif image.mode == 'P' and 'transparency' in image.info:  # Pillow warns about direct conversion
    image = image.convert('RGBA')
  image.load()
  return image if image.mode == 'RGB' else image.convert('RGB')


def square(image: Image.Image, size: int) -> np.ndarray:
  """The image as uint8 [size, size, 3]: the shorter side is resized to `size` and the center is cropped."""
  if image.size != (size, size):
    image.draft('RGB', (2 * size, 2 * size))  # decodes a large JPEG at reduced resolution, at least 2 × `size`
    side, (width, height) = min(image.size), image.size
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(rgb(image).resize((size, size), Image.Resampling.BILINEAR, box))
  return np.asarray(rgb(image))
