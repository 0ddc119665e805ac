"""Captions for the embedded dataset: the shape, its color, the background and the position.

Every caption names the shape or a synonym, so zero-shot classification by shape can be learned. Colors and positions
are independent of the shape. The same image has the same captions on every machine.
"""

import numpy as np

from ssl_jax.data import embedded

# Hue names by sixths of the color circle. A color with little saturation is gray.
HUES = ('red', 'yellow', 'green', 'turquoise', 'blue', 'purple')
GRAY = 0.12  # the channels of gray differ by less than this
MIDDLE = 2.0  # a shape within this many pixels of the center is neither left nor right, neither top nor bottom
SYNONYMS = {
  'disc': 'circle',
  'ring': 'hoop',
  'triangle': 'wedge',
  'square': 'box',
  'star': 'pentagram',
  'cross': 'plus sign',
  'crescent': 'moon',
  'hourglass': 'sand timer',
}
PHRASES = (
  'the picture shows {a_shape}',
  'we see {a_synonym}',
  'a picture of {a_shape}',
  '{a_shape} {place}',
  '{a_color} {shape}',
  '{a_color} {shape} on a {background} background',
  'there is {a_color} {synonym} {place}',
)


def captions(scenes: embedded.Scenes) -> list[tuple[str, ...]]:
  """One caption per template in `PHRASES` for each image.

  >>> captions(embedded.scenes('test', size=2))[1][5]
  'a light yellow ring on a dark yellow background'
  """
  shapes = [embedded.CLASSES[label] for label in scenes.labels]
  facts = zip(shapes, color_names(scenes.color), color_names(scenes.background), place_names(scenes.place), strict=True)
  return [tuple(_sentences(*fact)) for fact in facts]


def _sentences(shape: str, color: str, background: str, place: str) -> list[str]:
  words = dict(shape=shape, synonym=SYNONYMS[shape], color=color, background=background, place=place)
  words |= {f'a_{name}': _with_article(words[name]) for name in ('shape', 'synonym', 'color')}
  return [phrase.format(**words) for phrase in PHRASES]


def _with_article(noun: str) -> str:
  return f'an {noun}' if noun.startswith('hour') else f'a {noun}'


def color_names(colors: np.ndarray) -> list[str]:
  """'dark blue', 'light gray', ... for colors [N, 3] in [0, 1]. A luminance of 0.5 or more is light.

  >>> color_names(np.float32([[0.9, 0.1, 0.2], [0.8, 0.8, 0.8]]))
  ['dark red', 'light gray']
  """
  high, low = colors.max(axis=1), colors.min(axis=1)
  span = np.maximum(high - low, np.float32(1e-6))
  red, green, blue = colors.T
  # The position on the color circle in sixths, with red at 0.
  sixth = np.where(
    high == red, (green - blue) / span, np.where(high == green, 2 + (blue - red) / span, 4 + (red - green) / span)
  )
  hue = np.floor(sixth + np.float32(0.5)).astype(np.int32) % len(HUES)
  lightness = [np.float32(0.299) * r + np.float32(0.587) * g + np.float32(0.114) * b for r, g, b in colors]
  names = [HUES[k] if chroma >= GRAY else 'gray' for k, chroma in zip(hue, high - low, strict=True)]
  return [f'{"light" if light >= 0.5 else "dark"} {name}' for light, name in zip(lightness, names, strict=True)]


def place_names(places: np.ndarray) -> list[str]:
  """'at the top left', 'in the middle', ... for centers [N, 2], in pixels to the right of and below the image's center.

  >>> place_names(np.float32([[-3, -4], [0, 1], [0, 5]]))
  ['at the top left', 'in the middle', 'at the bottom']
  """
  third = lambda x: 0 if x < -MIDDLE else 2 if x > MIDDLE else 1
  names = []
  for right, below in places:
    words = ['top', '', 'bottom'][third(below)], ['left', '', 'right'][third(right)]
    both = ' '.join(word for word in words if word)
    names.append(f'at the {both}' if both else 'in the middle')
  return names
