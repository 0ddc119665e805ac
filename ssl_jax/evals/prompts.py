"""Zero-shot classification by prompts, sentences that name a class (CLIP, Radford et al. 2021)."""

import pathlib
from collections.abc import Sequence

import numpy as np

from ssl_jax.registry import nearest

NONE = 'none'

# {name: prompt templates}, where {} stands for a class name. The classifier of a class is the mean of its prompts.
TEMPLATES: dict[str, tuple[str, ...]] = {
  'plain': ('{}', 'a photo of a {}', 'a picture of a {}', 'an image of the {}'),
  'shapes': ('a {}', 'we see a {}', 'there is a {}', 'the picture shows a {}', 'a picture of a {}'),
  'imagenet': (
    'a photo of a {}',
    'a photo of the {}',
    'a photo of one {}',
    'a photo of my {}',
    'a photo of many {}',
    'a good photo of a {}',
    'a bad photo of a {}',
    'a sharp photo of the {}',
    'a blurry photo of a {}',
    'a bright photo of a {}',
    'a dark photo of the {}',
    'a black and white photo of a {}',
    'a close-up of a {}',
    'a photo of a {} from far away',
    'a photo of a {} from above',
    'a cropped photo of the {}',
    'a photo of a part of a {}',
    'a photo of a large {}',
    'a photo of a small {}',
    'a photo of a clean {}',
    'a photo of a dirty {}',
    'a photo of an odd {}',
    'a photo of a beautiful {}',
    'a photo of a {} that is hard to see',
    'a low-resolution photo of a {}',
    'a photo of the {} with artifacts of compression',
    'a photo of a {} indoors',
    'a photo of a {} outdoors',
    'a {} on a white background',
    'a drawing of a {}',
    'a painting of the {}',
    'a sketch of a {}',
    'a cartoon of a {}',
    'a sculpture of a {}',
    'a toy {}',
    'a rendered {}',
    'a {} in a video game',
    'a tattoo of a {}',
    'the {} in the picture',
    'this is a {}',
  ),
}
OF_SET = {
  'embedded': 'shapes',
  **dict.fromkeys(('imagenet', 'imagenet2012', 'imagenet100', 'tiny_imagenet'), 'imagenet'),
}


def templates(choice: str, set_name: str) -> tuple[str, ...]:
  """The templates of `eval.prompts`: a name in `TEMPLATES`, a file with one per line, or '': those of the dataset.

  >>> len(templates('', 'imagenet2012'))
  40
  """
  if not choice:
    return TEMPLATES[OF_SET.get(set_name, 'plain')]
  if choice in TEMPLATES:
    return TEMPLATES[choice]
  found = tuple(line for line in _lines('eval.prompts', choice, [*TEMPLATES, NONE]) if line)
  if wrong := [line for line in found if line.count('{}') != 1] or ([''] if not found else []):
    raise ValueError(f'eval.prompts = {choice!r} has the line {wrong[0]!r}: each must have {{}} once, for the class')
  return found


def class_names(choice: str, known: Sequence[str], labels: np.ndarray) -> tuple[str, ...]:
  """Readable class names, from the data source or from the file `eval.class_names`.

  A line of the file is a readable name, in the order of the classes, or the name in the data source, a tab, and the
  readable name.
  """
  names = [name.replace('_', ' ') for name in known]
  if choice:
    lines = _lines('eval.class_names', choice)
    if any('\t' in line for line in lines):
      words = dict(line.split('\t', 1) for line in lines if '\t' in line)
      if missing := [name for name in known if name not in words]:
        raise ValueError(f'eval.class_names = {choice!r} lacks {missing[0]!r}: give a line for each class')
      names = [words[name] for name in known]
    else:
      names = [line for line in lines if line]
  if len(names) <= labels.max():
    where = f'eval.class_names = {choice!r}' if choice else 'the data'
    raise ValueError(
      f'zero-shot classification needs the names of {labels.max() + 1} classes, and {where} has {len(names)}: set '
      'eval.class_names to a file with one per line, or eval.prompts=none'
    )
  return tuple(names)


def _lines(key: str, path: str, known: Sequence[str] = ()) -> list[str]:
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    hint = f'; {nearest(path, known)}' if known else ''
    raise ValueError(f'{key} = {path!r} is not a file: give a text file with one entry per line{hint}')
  try:
    return [line.strip() for line in file.read_text(encoding='utf-8').splitlines()]
  except UnicodeDecodeError as error:
    raise ValueError(f'{key} = {path!r} is not UTF-8 text ({error}): give another file') from error


def classifier(features: np.ndarray, classes: int) -> np.ndarray:
  """The mean direction of the prompts of each class.  [classes · templates, d], class by class -> [classes, d]

  As in CLIP, the features of each prompt are normalized, then averaged, and the mean is normalized again.
  """
  parted = unit(features).reshape(classes, -1, features.shape[1])
  return unit(parted.mean(axis=1))


def unit(x: np.ndarray) -> np.ndarray:
  """Rows scaled to length 1. Rows of zeros stay zero."""
  x = np.asarray(x, np.float32)
  return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-12))
