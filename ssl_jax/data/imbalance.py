"""Imbalanced subsets of a labelled set.

Each function takes the labels int `[N]` of the whole set and returns the sorted positions int64 `[M]` of the images
that stay, drawn without replacement and fixed by the seed. Classes are 0 ... C - 1, C - 1 being the largest label.
"""

import inspect
import math
from collections.abc import Callable, Mapping

import numpy as np

from ssl_jax.registry import nearest


def exponential_tail(labels, ratio, n_max=None, *, seed):
  """CIFAR-LT (Cao et al. 2019): class c of C keeps floor(n_max · ratio^(c / (C - 1))); n_max: the largest class."""
  if not 0 < ratio <= 1:
    raise ValueError(f'ratio is {ratio}; it is the share of the last class in the first, so take it from (0, 1]')
  sizes = _sizes(labels)
  n_max = sizes.max() if n_max is None else n_max
  wanted = [math.floor(n_max * ratio ** (c / max(len(sizes) - 1, 1))) for c in range(len(sizes))]
  return _draw(labels, np.minimum(wanted, sizes), seed)


def linear_imbalance(labels, *, seed):
  """Of the n images of a class in group g of G, floor(n · g / G) stay (cacr 5.1).

  Groups are those of cacr's code: ten of neighbouring classes, or each class by itself where there are fewer.
  """
  sizes = _sizes(labels)
  count, groups = _groups(len(sizes))
  return _draw(labels, [n * g // count for g, n in zip(groups, sizes, strict=True)], seed)


def exponential_imbalance(labels, *, seed):
  """Of the n images of a class in group g of G, floor(n · e^(g - G)) stay (cacr 5.1, as its code has it).

  Groups are those of `linear_imbalance`.
  """
  sizes = _sizes(labels)
  count, groups = _groups(len(sizes))
  return _draw(labels, [math.floor(n * math.exp(g - count)) for g, n in zip(groups, sizes, strict=True)], seed)


def _groups(classes: int) -> tuple[int, list[int]]:
  """(G, the group of each class, 1 ... G)"""
  count = min(10, classes)
  return count, [c * count // classes + 1 for c in range(classes)]


def pareto(labels, total=115_846, n_max=1280, n_min=5, alpha=6.0, *, seed):
  """ImageNet-LT (Liu et al. 2019; supervised A.3.4): `total` images, n_max to n_min a class, by a Pareto law.

  The paper prints only these numbers, so the rest is our choice: the C sizes are evenly spaced quantiles of the law,
  x(u) = (1 - u)^(-1/alpha) for u from 0 to a cut, mapped linearly to [n_min, n_max], with the cut that gives `total`.
  Sizes go to classes at random, among those that have so many images.
  """
  sizes = _sizes(labels)
  wanted = _pareto_sizes(len(sizes), total, n_max, n_min, alpha)
  free = list(np.random.default_rng((seed, 1)).permutation(len(sizes)))
  kept = np.zeros_like(sizes)
  for n in wanted:  # the largest first: fewest classes can hold them
    c = next((c for c in free if sizes[c] >= n), None)
    if c is None:
      raise ValueError(f'n_max is {n_max}, but no class is left with the {n} images that the law asks for; lower it')
    free.remove(c)
    kept[c] = n
  return _draw(labels, kept, seed)


def uniform(labels, total, *, seed):
  """`total` images regardless of class: ImageNet-Uni, the balanced twin of ImageNet-LT (supervised A.3.4)."""
  if not 0 < total <= len(labels):
    raise ValueError(f'total is {total}, but the set has {len(labels)} images; take it from 1 to {len(labels)}')
  return np.sort(np.random.default_rng(seed).choice(len(labels), total, replace=False))


RULES = {rule.__name__: rule for rule in (exponential_tail, linear_imbalance, exponential_imbalance, pareto, uniform)}


# Of each parameter its type, what holds for it, and what to give.
RANGES = {
  'seed': (int, lambda x: x >= 0, 'a whole number from 0'),
  'ratio': (int | float, lambda x: 0 < x <= 1, 'the share of the last class in the first, from (0, 1]'),
  'n_max': (int | None, lambda x: x is None or x >= 1, 'the images of the largest class, 1 or more'),
  'n_min': (int, lambda x: x >= 0, 'the images of the smallest class, 0 or more'),
  'total': (int, lambda x: x >= 1, 'a number of images, 1 or more'),
  'alpha': (int | float, lambda x: 0 < x < math.inf, 'a finite number above 0'),
}


def create(spec: Mapping) -> Callable[[np.ndarray], np.ndarray] | None:
  """labels -> positions, by a config's `imbalance` section: a rule's name, its parameters and a seed (0)."""
  parameters = {'seed': 0, **spec}
  name = parameters.pop('name')
  if name == 'none':
    return None
  if name not in RULES:
    raise ValueError(f'imbalance.name = {name!r} does not exist: {nearest(name, ["none", *RULES])}')
  known = inspect.signature(RULES[name]).parameters
  for key, value in parameters.items():
    if key not in known or key == 'labels':
      others = [key for key in known if key != 'labels']
      raise ValueError(f'imbalance.{key} = {value!r} is no parameter of {name!r}: {nearest(key, others)}')
  for key, parameter in known.items():
    if parameter.default is parameter.empty and key not in ('labels', *parameters):
      raise ValueError(f'imbalance.{key} is missing: {name!r} needs it')

  for key, value in parameters.items():
    kind, holds, mend = RANGES[key]
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
      raise ValueError(f'imbalance.{key} = {value!r} is out of range: give {mend}')
  if parameters.get('n_min', 0) > (parameters.get('n_max') or math.inf):
    raise ValueError(f'imbalance.n_min = {parameters["n_min"]} is more than n_max = {parameters["n_max"]}: lower it')

  def rule(labels):
    try:
      return RULES[name](labels, **parameters)
    except (TypeError, ValueError) as error:
      raise ValueError(f'imbalance: {error}') from error

  return rule


def _pareto_sizes(classes, total, n_max, n_min, alpha):
  """int64 `[C]`, from n_max down to n_min, of the given sum."""

  def sizes(log_cut):  # log_cut = -log(1 - u) of the last class: near 0 a straight line, then ever more concave
    x = np.expm1(-np.log1p(np.linspace(0, 1, classes) * np.expm1(-log_cut)) / alpha)
    return n_min + (n_max - n_min) * x / x[-1]

  low, high = 1e-6, 30.0
  if not sizes(high).sum() <= total <= sizes(low).sum():
    least, most = math.ceil(sizes(high).sum()), math.floor(sizes(low).sum())
    raise ValueError(
      f'total is {total}, but {classes} classes of {n_min} to {n_max} images by this law have {least} to {most};'
      ' take it from there'
    )
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if sizes(middle).sum() > total else (low, middle)
  exact = sizes(high)
  # Round down, then give the remainder to the largest fractions: the sum is met to the image, the ends stay.
  whole = np.floor(exact + 1e-9).astype(np.int64)
  fraction = exact - whole
  fraction[[0, -1]] = -1
  whole[np.argsort(-fraction, kind='stable')[: total - whole.sum()]] += 1
  return whole[::-1]


def _sizes(labels):
  labels = np.asarray(labels)
  if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in 'iu' or labels.min() < 0:
    raise ValueError('labels are missing or not whole numbers from 0; an imbalanced subset needs a labelled set')
  return np.bincount(labels)


def _draw(labels, counts, seed):
  """Sorted positions of counts[c] random images of each class c."""
  rng = np.random.default_rng((seed, 0))
  labels = np.asarray(labels)
  return np.sort(np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in enumerate(counts)]))
