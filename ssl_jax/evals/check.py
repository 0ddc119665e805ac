"""Validation of features, labels and scores, shared by all evaluations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ssl_jax.data.sources import reject_gaps


@jax.jit
def _all_finite(x):
  """Whether the squared norm of every row is finite."""
  return jnp.isfinite(jnp.square(x).sum(axis=1)).all()


def features(name: str, x: ArrayLike) -> jax.Array:
  """Checks features [n, d] and returns them as float32 on the device."""
  if np.ndim(x) != 2 or 0 in np.shape(x):
    raise ValueError(f'{name}: shape {np.shape(x)}, expected [examples, dimensions] and at least one of each')
  x = jnp.asarray(x, jnp.float32)
  if not _all_finite(x):
    raise ValueError(
      f'{name}: holds NaN or infinity, or rows with a norm above 1e19, which overflows float32; extract the features '
      'from a checkpoint that has not diverged, or scale them'
    )
  return x


def views(name: str, x: ArrayLike) -> jax.Array:
  """Checks the features [v, n, d] of v views and returns them as float32 on the device."""
  if np.ndim(x) != 3 or 0 in np.shape(x):
    raise ValueError(f'{name}: shape {np.shape(x)}, expected [views, examples, dimensions]')
  v, n, d = np.shape(x)
  return features(name, jnp.reshape(jnp.asarray(x, jnp.float32), (v * n, d))).reshape(v, n, d)


def two(name: str, x: ArrayLike, other_name: str, other: ArrayLike) -> tuple[jax.Array, jax.Array]:
  """Checks that two feature arrays have the same shape, and returns both.  [n, d], [n, d]"""
  x, other = features(name, x), features(other_name, other)
  if x.shape != other.shape:
    raise ValueError(f'{other_name}: shape {other.shape}, expected {x.shape}, that of {name}')
  return x, other


def finite(name: str, scores: Any, fix: str) -> None:
  """Raises if a score is not finite, because the predicted class would then be arbitrary."""
  if not np.isfinite(scores).all():
    raise ValueError(f'{name} contain NaN or infinity: {fix}')


def labels(name: str, y: ArrayLike | None, examples: int, *, classes: int = 2) -> np.ndarray:
  """Checks labels [examples] of at least `classes` different classes and returns them as int32 on the host."""
  if y is None:
    raise ValueError(f'{name} = None: this evaluation needs a label for each example')
  y = np.asarray(y)
  if y.shape != (examples,):
    raise ValueError(f'{name}: shape {y.shape}, expected ({examples},), one label for each feature')
  if not np.issubdtype(y.dtype, np.integer):
    raise ValueError(f'{name}: dtype {y.dtype}, expected integers that number the classes from 0')
  if y.min() < 0:
    raise ValueError(f'{name}: {int((y < 0).sum())} negative (missing) labels; drop these examples first')
  reject_gaps(name, y)
  if len(np.unique(y)) < classes:
    raise ValueError(f'{name}: every example is of class {y[0]}; expected at least {classes} classes')
  return y.astype(np.int32)


def seen(
  name: str, y: np.ndarray, train_name: str, train: np.ndarray, shown: Callable[[int], object] = lambda label: label
) -> None:
  """Raises unless every class of `y` occurs in `train`: a classifier cannot predict a class it was never shown.

  `shown` is what the message calls a class.
  """
  if unseen := [shown(label) for label in np.setdiff1d(y, train)[:5].tolist()]:
    raise ValueError(f'{name}: classes {unseen} do not occur in {train_name}; drop them or add examples')


def same_width(name: str, x: jax.Array, other_name: str, other: jax.Array) -> None:
  """Raises unless both arrays have the same feature dimension."""
  if x.shape[1] != other.shape[1]:
    raise ValueError(
      f'{name}: {x.shape[1]} dimensions, but {other_name} has {other.shape[1]}; use one encoder for both'
    )
