"""Imbalanced subsets of a labeled dataset.

Each rule maps the labels int `[N]` of the dataset to the sorted positions int64 `[M]` of the images to keep, drawn
without replacement. The subset is a function of the seed. Classes are 0 ... C - 1, where C - 1 is the largest label.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ssl_jax.registry import find, prefix, require

# For each parameter of a rule: its type, a condition, and a description for error messages.
RANGES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
  'seed': (int, lambda x: x >= 0, 'a whole number from 0'),
  'ratio': (int | float, lambda x: 0 < x <= 1, 'the size of the last class relative to the first, in (0, 1]'),
  'n_max': (int | None, lambda x: x is None or x >= 1, 'the size of the largest class, at least 1'),
  'n_min': (int, lambda x: x >= 0, 'the size of the smallest class, at least 0'),
  'total': (int, lambda x: x >= 1, 'a number of images, at least 1'),
  'alpha': (int | float, lambda x: 0 < x < math.inf, 'positive and finite'),
}


def exponential_tail(labels: np.ndarray, ratio: float, n_max: int | None = None, *, seed: int = 0) -> np.ndarray:
  """CIFAR-LT (Cao et al. 2019): class c of C keeps floor(n_max · ratio^(c / (C - 1))) images.

  `n_max` defaults to the size of the largest class.
  """
  _check(ratio=ratio, n_max=n_max, seed=seed)
  sizes = _sizes(labels)
  n_max = sizes.max() if n_max is None else n_max
  wanted = [math.floor(n_max * ratio ** (c / max(len(sizes) - 1, 1))) for c in range(len(sizes))]
  return _draw(labels, np.minimum(wanted, sizes), seed)


def linear_imbalance(labels: np.ndarray, *, seed: int = 0) -> np.ndarray:
  """A class of n images in group g of G keeps floor(n · g / G) (CACR, Zheng et al. 2023, sec. 5.1).

  As in the authors' code, there are ten groups of neighboring classes, or one per class if there are fewer classes.
  """
  sizes = _sizes(labels)
  count, groups = _groups(len(sizes))
  return _draw(labels, [n * g // count for g, n in zip(groups, sizes, strict=True)], seed)


def exponential_imbalance(labels: np.ndarray, *, seed: int = 0) -> np.ndarray:
  """A class of n images in group g of G keeps floor(n · e^(g - G)) (CACR, sec. 5.1, as in the authors' code).

  The groups are those of `linear_imbalance`.
  """
  sizes = _sizes(labels)
  count, groups = _groups(len(sizes))
  return _draw(labels, [math.floor(n * math.exp(g - count)) for g, n in zip(groups, sizes, strict=True)], seed)


def _groups(classes: int) -> tuple[int, list[int]]:
  """(G, the group of each class from 1 to G)"""
  count = min(10, classes)
  return count, [c * count // classes + 1 for c in range(classes)]


def pareto(
  labels: np.ndarray, total: int = 115_846, n_max: int = 1280, n_min: int = 5, alpha: float = 6.0, *, seed: int = 0
) -> np.ndarray:
  """ImageNet-LT (Liu et al. 2019; Lee 2025, A.3.4): `total` images, with Pareto-distributed class sizes.

  The papers give only the default values. The rest is our choice: the C sizes are evenly spaced quantiles of the Pareto
  law, x(u) = (1 - u)^(-1/alpha) for u from 0 to a cut, mapped linearly to [n_min, n_max]. The cut is chosen so that the
  sizes sum to `total`. Sizes are assigned at random to classes that have enough images.
  """
  _check(total=total, n_max=n_max, n_min=n_min, alpha=alpha, seed=seed)
  require('n_max', n_max, lambda x: x is not None, RANGES['n_max'][2])  # only `exponential_tail` takes None
  sizes = _sizes(labels)
  if len(sizes) < 2:
    raise ValueError("name = 'pareto' needs at least 2 classes: use 'uniform'")
  wanted = _pareto_sizes(len(sizes), total, n_max, n_min, alpha)
  free = list(np.random.default_rng((seed, 1)).permutation(len(sizes)))
  kept = np.zeros_like(sizes)
  for n in wanted:  # largest first, because the fewest classes have enough images for it
    c = next((c for c in free if sizes[c] >= n), None)
    if c is None:
      raise ValueError(f'n_max = {n_max} must be lower: the law needs a class of {n} images, and none is left')
    free.remove(c)
    kept[c] = n
  return _draw(labels, kept, seed)


def uniform(labels: np.ndarray, total: int, *, seed: int = 0) -> np.ndarray:
  """`total` images regardless of class: ImageNet-Uni, the balanced counterpart of ImageNet-LT (Lee 2025, A.3.4)."""
  require('total', total, lambda x: 0 < x <= len(labels), f'from 1 to the {len(labels)} images of the set')
  return np.sort(np.random.default_rng(seed).choice(len(labels), total, replace=False))


_RULES = (exponential_tail, linear_imbalance, exponential_imbalance, pareto, uniform)
RULES: dict[str, Callable[..., Any]] = {'none': lambda: None} | {rule.__name__: rule for rule in _RULES}


def create(spec: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray] | None:
  """The function labels -> positions for the config section `imbalance`; None if its name is 'none'."""
  found = find('imbalance', spec, RULES, given=['labels'])
  if found.name == 'none':
    return None
  with prefix('imbalance'):
    _check(**found.parameters)

  def rule(labels: np.ndarray) -> np.ndarray:
    with prefix('imbalance'):
      return found.entry(labels, **found.parameters)

  return rule


def _check(**parameters: Any) -> None:
  for key, value in parameters.items():
    kind, holds, must_be = RANGES[key]
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    valid = lambda x, ok=is_kind, holds=holds: ok and holds(x)
    require(key, value, valid, must_be)
  if (n_min := parameters.get('n_min', 0)) > (n_max := parameters.get('n_max') or math.inf):
    raise ValueError(f'n_min = {n_min} must be at most n_max = {n_max}')


def _pareto_sizes(classes: int, total: int, n_max: int, n_min: int, alpha: float) -> np.ndarray:
  """Class sizes int64 `[C]` from n_max down to n_min that sum to `total`."""

  def sizes(log_cut: float) -> np.ndarray:  # log_cut = -log(1 - u) of the last class; the sum decreases with it
    x = np.expm1(-np.log1p(np.linspace(0, 1, classes) * np.expm1(-log_cut)) / alpha)
    return n_min + (n_max - n_min) * x / x[-1]

  low, high = 1e-6, 30.0
  if not sizes(high).sum() <= total <= sizes(low).sum():
    least, most = math.ceil(sizes(high).sum()), math.floor(sizes(low).sum())
    raise ValueError(f'total = {total} must be in [{least}, {most}] for {classes} classes of {n_min} to {n_max} images')
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if sizes(middle).sum() > total else (low, middle)
  exact = sizes(high)
  # Round down, then add 1 where the fractional part is largest, except at both ends, until the sum is exact.
  whole = np.floor(exact + 1e-9).astype(np.int64)
  fraction = exact - whole
  fraction[[0, -1]] = -1
  whole[np.argsort(-fraction, kind='stable')[: total - whole.sum()]] += 1
  return whole[::-1]


def _sizes(labels: np.ndarray) -> np.ndarray:
  labels = np.asarray(labels)
  if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in 'iu' or labels.min() < 0:
    raise ValueError('labels must be whole numbers from 0: use a labeled set')
  return np.bincount(labels)


def _draw(labels: np.ndarray, counts: Any, seed: int) -> np.ndarray:
  """Sorted positions of counts[c] random images of each class c."""
  rng = np.random.default_rng((seed, 0))
  labels = np.asarray(labels)
  return np.sort(np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in enumerate(counts)]))
