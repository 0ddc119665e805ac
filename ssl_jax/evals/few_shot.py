"""Few-shot classification with an encoder, by the protocol of ELEVATER (Li et al. 2022) that CACR's Table 6 uses.

A few training images per class, the shots, are drawn. A fifth of them is held out to choose the learning rate and the
weight decay. The classifier is then trained on all shots.

- The head is batch norm without scale and bias, followed by a linear layer. It is trained alone (linear probing) or
  with the encoder (fine-tuning), on images without augmentation.
- The optimizer is SGD with Nesterov momentum 0.9, a constant learning rate, batches of 32, and weight decay of every
  parameter as an L2 term. The loss is cross-entropy, or binary cross-entropy if images have several labels.
- For each learning rate, seven weight decays are tried, then others around the best one in ever smaller steps. Each
  candidate is trained for 10 epochs and scored by the metric of the dataset. The best one is trained for 50 epochs.

ELEVATER's toolkit scores candidates at their best epoch and reports the best epoch on the test images. This code always
uses the last epoch. All batches of an epoch have the same size, so up to one image per batch is left out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from ssl_jax.arrays import cross_entropy
from ssl_jax.data import pipeline
from ssl_jax.models.norm import BatchNorm

MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How a classifier is trained on a few images per class; the defaults are ELEVATER's."""

  shots: int = 5
  held_out: float = 0.2  # share of the shots of each class on which candidates are scored
  search_epochs: int = 10
  epochs: int = 50
  batch: int = 32
  learning_rates: tuple[float, ...] = tuple(10.0**power for power in range(-6, 0))
  decays: tuple[float, float, int] = (-6.0, 6.0, 97)  # the grid: from 10^low to 10^high, number of values
  first: int = 16  # stride in the grid of the weight decays that are tried first
  then: tuple[int, ...] = (8, 4, 2, 1)  # later strides: each tries both sides of the best so far

  def grid(self) -> np.ndarray:
    """All weight decays, in increasing order."""
    return np.logspace(*self.decays)


class Chosen(NamedTuple):
  """The hyperparameters with the best score on the held-out shots."""

  learning_rate: float
  weight_decay: float
  score: float  # on the held-out shots


def draw(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
  """Sorted positions of `shots` random examples per class, or all of a class that has fewer.  [n] or [n, c] -> [m]

  If images have several labels, they are drawn until every class has enough of them.
  """
  order = np.random.default_rng(seed).permutation(len(targets))
  return np.sort(order[_first(targets[order], lambda count: shots)])


def held_out(targets: np.ndarray, share: float) -> np.ndarray:
  """Which shots are held out to choose the hyperparameters: at least one per class.  [n] or [n, c] -> bool [n]"""
  kept = np.zeros(len(targets), bool)
  kept[_first(targets, lambda count: math.ceil(count * share))] = True
  return kept


def _first(targets: np.ndarray, wanted: Callable[[int], int]) -> np.ndarray:
  """Positions of the first examples such that a class with `count` examples gets at least `wanted(count)` of them."""
  one_hot = targets if targets.ndim == 2 else targets[:, None] == np.arange(targets.max() + 1)[None, :]
  missing = np.array([wanted(int(count)) for count in one_hot.sum(axis=0)])
  chosen = []
  for position, classes in enumerate(np.asarray(one_hot, bool)):
    if (missing[classes] > 0).any():
      chosen.append(position)
      missing = missing - classes
  return np.array(chosen, int)


def search(protocol: Protocol, score: Callable[[Sequence[tuple[float, float]]], Sequence[float]]) -> Chosen:
  """The best (learning rate, weight decay). Ties go to the first learning rate and to the decay that was tried first.

  `score` maps such pairs to their scores on the held-out shots.
  """
  grid, rates = protocol.grid(), protocol.learning_rates
  best = {rate: (0, -1.0) for rate in rates}  # (index in the grid, score)

  def try_all(places):
    tried = [(rate, place) for rate in rates for place in places[rate]]
    for (rate, place), found in zip(tried, score([(rate, float(grid[place])) for rate, place in tried]), strict=True):
      if found > best[rate][1]:
        best[rate] = place, float(found)

  try_all(dict.fromkeys(rates, range(0, len(grid), protocol.first)))
  for step in protocol.then:
    peaks = {rate: best[rate][0] for rate in rates}
    try_all({rate: [k for k in (peak - step, peak + step) if 0 <= k < len(grid)] for rate, peak in peaks.items()})
  rate = max(rates, key=lambda rate: best[rate][1])  # ties go to the first
  return Chosen(rate, float(grid[best[rate][0]]), best[rate][1])


class Head(nn.Module):
  """Batch norm without scale and bias, then a linear layer.  [n, d] -> [n, classes]"""

  classes: int

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    x = BatchNorm(affine=False, name='norm')(x, train)
    uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')  # torch.nn.Linear's
    return nn.Dense(self.classes, kernel_init=uniform, precision=jax.lax.Precision.HIGHEST, name='linear')(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A classifier as pure functions of variables {'params': ..., 'batch_stats': ...}.

  Attributes:
    start: seed -> initial variables.
    apply: (variables, inputs, train) -> logits and, in training, the new running statistics.
    multi_label: whether images have several labels.
    together: whether candidates are trained at once with `jax.vmap`; otherwise one after the other.
  """

  start: Callable[[int], Any]
  apply: Callable[..., tuple[jax.Array, Any]]
  multi_label: bool
  together: bool

  @functools.cached_property
  def update(self) -> Callable:
    """(state, rate, decay, inputs [b, ...], targets [b] or [b, c]) -> state, of one candidate or (`together`) all."""

    def update(state, rate, decay, inputs, targets):
      def loss(params):
        logits, stats = self.apply({'params': params, 'batch_stats': state['batch_stats']}, inputs, True)
        return self.loss(logits, targets), stats

      grads, stats = jax.grad(loss, has_aux=True)(state['params'])
      grads = jax.tree.map(lambda g, p: g + decay * p, grads, state['params'])
      trace = jax.tree.map(lambda t, g: MOMENTUM * t + g, state['trace'], grads)
      step = lambda p, g, t: p - rate * (g + MOMENTUM * t)
      params = jax.tree.map(step, state['params'], grads, trace)
      return {'params': params, 'batch_stats': stats, 'trace': trace}

    return jax.jit(jax.vmap(update, in_axes=(0, 0, 0, None, None)) if self.together else update, donate_argnums=0)

  @functools.cached_property
  def logits(self) -> Callable:
    """(variables, inputs) -> [b, c] for one candidate or, if `together`, [s, b, c] for s candidates."""
    one = lambda variables, inputs: self.apply(variables, inputs, False)[0]
    return jax.jit(jax.vmap(one, in_axes=(0, None)) if self.together else one)

  def loss(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of classes [b], or mean binary cross-entropy of labels [b, c]."""
    if self.multi_label:
      return optax.sigmoid_binary_cross_entropy(logits, targets.astype(logits.dtype)).mean()
    return cross_entropy(logits, targets).mean()


def on_features(width: int, classes: int, multi_label: bool) -> Model:
  """A head on fixed features [n, width]: linear probing."""
  head = Head(classes)
  return Model(lambda seed: _start(head, width, seed), _applied(head), multi_label, together=True)


def on_encoder(
  encoder: nn.Module, variables: Any, shown: Callable, width: int, classes: int, multi_label: bool
) -> Model:
  """A head on an encoder, trained together: fine-tuning. Inputs are uint8 images, which `shown` normalizes."""
  head = Head(classes)
  stats = variables.get('batch_stats', {})

  def start(seed):
    mine = _start(head, width, seed)
    return {
      'params': {'encoder': variables['params'], 'head': mine['params']},
      'batch_stats': {'encoder': stats, 'head': mine['batch_stats']},
    }

  def apply(both, images, train):
    of = lambda part: {'params': both['params'][part], 'batch_stats': both['batch_stats'][part]}
    x, encoder_stats = _applied(encoder)(of('encoder'), jax.vmap(shown)(images), train)
    logits, head_stats = _applied(head)(of('head'), jnp.asarray(x, jnp.float32), train)
    return logits, {'encoder': encoder_stats, 'head': head_stats}

  return Model(start, apply, multi_label, together=False)


def _start(head: Head, width: int, seed: int) -> Any:
  return jax.device_get(jax.jit(lambda: head.init(jax.random.key(seed), jnp.zeros((2, width)), train=False))())


def _applied(module: nn.Module) -> Callable:
  """(variables, inputs, train) -> outputs and the new running statistics."""

  def apply(variables, inputs, train):
    if not train:
      return module.apply(variables, inputs, train=False), variables['batch_stats']
    outputs, changed = module.apply(variables, inputs, train=True, mutable=['batch_stats'])
    return outputs, changed.get('batch_stats', {})

  return apply


def train(
  model: Model,
  inputs: np.ndarray,
  targets: np.ndarray,
  candidates: Sequence[tuple[float, float]],
  *,
  epochs: int,
  batch: int,
  seed: int,
) -> list[Any]:
  """Trains each candidate (learning rate, weight decay). Returns the variables, on the device.

  If `model.together`, the list has a single tree, with a leading axis for the candidates.
  """
  count = -(-len(inputs) // batch)
  size = len(inputs) // count
  rates, decays = (jnp.asarray(values, jnp.float32) for values in zip(*candidates, strict=True))
  start = model.start(seed)
  fresh = {**start, 'trace': jax.tree.map(np.zeros_like, start['params'])}

  def trained(state, rate, decay):
    for epoch in range(epochs):
      order = pipeline.order(seed, epoch, len(inputs))[: count * size].reshape(count, size)
      for rows in order:
        state = model.update(state, rate, decay, inputs[rows], targets[rows])
    return {name: state[name] for name in ('params', 'batch_stats')}

  if model.together:
    states = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (len(candidates), *x.shape)), fresh)
    return [trained(states, rates, decays)]
  return [trained(jax.tree.map(jnp.array, fresh), rate, decay) for rate, decay in zip(rates, decays, strict=True)]


def predictions(model: Model, variables: Sequence[Any], inputs: np.ndarray, batch: int) -> list[np.ndarray]:
  """Logits [n, c] of each candidate, from the variables that `train` returns."""
  found = []
  for part in variables:
    blocks = []
    for start in range(0, len(inputs), batch):
      rows = inputs[start : start + batch]
      padding = [(0, min(batch, len(inputs)) - len(rows)), *[(0, 0)] * (rows.ndim - 1)]  # one shape, one compilation
      blocks.append(np.asarray(model.logits(part, np.pad(rows, padding)))[..., : len(rows), :])
    logits = np.concatenate(blocks, axis=-2)
    found += list(logits) if model.together else [logits]
  return found


def choose(
  model: Model, inputs: np.ndarray, targets: np.ndarray, metric: Callable, protocol: Protocol, seed: int
) -> Chosen:
  """The hyperparameters that are best on the held-out shots. A candidate that diverges scores 0."""
  out = held_out(targets, protocol.held_out)
  if out.all():
    raise ValueError(f'held_out = {protocol.held_out:g} leaves no image to train on: give two or more images per class')

  def score(candidates):
    settings: dict[str, Any] = dict(epochs=protocol.search_epochs, batch=protocol.batch, seed=seed)
    scores = []
    for group in [candidates] if model.together else [[one] for one in candidates]:  # one encoder at a time
      variables = train(model, inputs[~out], targets[~out], group, **settings)
      scores += predictions(model, variables, inputs[out], max(protocol.batch, 256))
    return [metric(found, targets[out]) if np.isfinite(found).all() else 0.0 for found in scores]

  return search(protocol, score)
