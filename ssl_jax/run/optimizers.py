"""Optimizers, learning-rate schedules, and parameters that are exempt from weight decay."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ssl_jax.registry import require_choice

Mask = Callable[[Any], Any]  # params -> a tree of booleans

# `optimizer.scaling`: batch size -> factor of the learning rate.
SCALINGS: dict[str, Callable[[int], float]] = {
  'none': lambda batch_size: 1.0,
  'linear': lambda batch_size: batch_size / 256,
  'sqrt': lambda batch_size: batch_size**0.5,
}

# `optimizer.schedule`: (peak, steps after warm-up, {step after warm-up: factor}) -> schedule.
SCHEDULES: dict[str, Callable[[float, int, dict[int, float]], optax.Schedule]] = {
  'cosine': lambda peak, steps, drops: optax.cosine_decay_schedule(peak, steps),
  'linear': lambda peak, steps, drops: optax.linear_schedule(peak, 0.0, steps),
  'step': lambda peak, steps, drops: optax.piecewise_constant_schedule(peak, drops),
  'constant': lambda peak, steps, drops: optax.constant_schedule(peak),
}


def check(optimizer: Mapping) -> None:
  """Raises a ValueError for an unknown name in the config section `optimizer`."""
  tables: dict[str, Mapping] = {'name': OPTIMIZERS, 'scaling': SCALINGS, 'schedule': SCHEDULES}
  for key, table in tables.items():
    require_choice(f'optimizer.{key}', optimizer[key], table)


def peak_learning_rate(optimizer: Mapping, batch_size: int) -> float:
  """The highest learning rate of a run: `optimizer.learning_rate`, scaled with the batch size."""
  check(optimizer)
  return optimizer['learning_rate'] * SCALINGS[optimizer['scaling']](batch_size)


def learning_rate(optimizer: Mapping, *, batch_size: int, steps_per_epoch: int, total_steps: int) -> optax.Schedule:
  """A function step -> learning rate: linear warm-up from zero, then `optimizer.schedule`."""
  peak = peak_learning_rate(optimizer, batch_size)
  warmup = round(optimizer['warmup_epochs'] * steps_per_epoch)
  if warmup >= total_steps and warmup:
    raise ValueError(
      f'optimizer.warmup_epochs = {optimizer["warmup_epochs"]} is {warmup} steps, and the run has {total_steps}: '
      'set it to 0, or make the run longer'
    )
  drops: dict[int, float] = {}
  for epoch in optimizer['milestones']:
    at = round(epoch * steps_per_epoch) - warmup
    drops[at] = drops.get(at, 1.0) * optimizer['decay']
  schedule = SCHEDULES[optimizer['schedule']](peak, total_steps - warmup, drops)
  if warmup:
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), schedule], [warmup])
  return lambda step: schedule(jnp.asarray(step, jnp.float32))  # optax multiplies the step by floats


def decayed(params: Any) -> Any:
  """The mask of weight decay: False for biases, normalization parameters and scalars, all with fewer than two axes."""
  return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def _network_weights(params):
  """The mask of network weights: False for the temperature, the loss and a ViT's frozen patch projection.

  Weight decay would pull the temperature to 1, and the bias of a loss to 0.
  """
  exempt = lambda path: any(getattr(part, 'key', None) in ('temperature', 'loss', 'patch_embed') for part in path)
  return jax.tree_util.tree_map_with_path(lambda path, _: not exempt(path), params)


def _decay_mask(optimizer: Mapping) -> Mask:
  both = lambda params: jax.tree.map(lambda a, b: a and b, decayed(params), _network_weights(params))
  return both if optimizer['exempt'] else _network_weights


def sgd(optimizer: Mapping, schedule: optax.Schedule) -> optax.GradientTransformation:
  """PyTorch's SGD: weight decay is added to the gradient, then momentum, then the learning rate."""
  return optax.chain(
    optax.add_decayed_weights(optimizer['weight_decay'], _decay_mask(optimizer)),
    optax.trace(optimizer['momentum']),
    optax.scale_by_learning_rate(schedule),
  )


def lars(optimizer: Mapping, schedule: optax.Schedule) -> optax.GradientTransformation:
  """LARS (You et al. 2017): the update of each weight array is scaled by 0.001·|w| / |g + decay·w|.

  The denominator in the paper is |g| + decay·|w|, which differs noticeably only for large weight decay.
  """
  mask = _decay_mask(optimizer)
  return optax.lars(schedule, optimizer['weight_decay'], mask, trust_ratio_mask=mask, momentum=optimizer['momentum'])


def adamw(optimizer: Mapping, schedule: optax.Schedule) -> optax.GradientTransformation:
  """PyTorch's AdamW: weight decay is decoupled from the gradient."""
  b1, b2 = optimizer['betas']
  decay = dict(weight_decay=optimizer['weight_decay'], mask=_decay_mask(optimizer))
  return for_strict_promotion(optax.adamw(schedule, b1=b1, b2=b2, **decay))


def muon(optimizer: Mapping, schedule: optax.Schedule) -> optax.GradientTransformation:
  """Muon (Jordan 2024): the momentum of a kernel is orthogonalized approximately. AdamW trains all other parameters.

  Kernel updates are scaled to the size of AdamW's (Liu et al. 2025), and weight decay is decoupled.
  """
  mask = _decay_mask(optimizer)
  kernels = optax.chain(
    _stacked(optimizer['momentum']),
    optax.add_decayed_weights(optimizer['weight_decay'], mask),
    optax.scale_by_learning_rate(schedule),
  )
  return optax.partition({'kernels': kernels, 'others': adamw(optimizer, schedule)}, _kernels)


def _kernels(params):
  """'kernels' for the weights of dense layers and convolutions, whose last axis is the output; otherwise 'others'."""

  def matrix(path, p, learned):
    embedding = getattr(path[-1], 'key', None) == 'embedding'
    return 'kernels' if learned and jnp.ndim(p) in (2, 4) and not embedding else 'others'

  return jax.tree_util.tree_map_with_path(matrix, params, _network_weights(params))


def _stacked(momentum: float) -> optax.GradientTransformation:
  """Muon's update direction for kernels. Kernels of one shape are stacked, for fewer and larger matrix products."""
  dimensions = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
  of_stacks = lambda stacks: dict.fromkeys(stacks, dimensions)
  muon = for_strict_promotion(optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=of_stacks))
  matrix = lambda kernel: kernel.reshape(-1, kernel.shape[-1])

  def stack(tree):
    groups: dict[str, list] = {}
    for kernel in map(matrix, jax.tree.leaves(tree)):
      groups.setdefault(str(kernel.shape), []).append(kernel)
    return {shape: jnp.stack(group) for shape, group in groups.items()}

  def update(grads, state, params=None):
    del params
    stacks, state = muon.update(stack(grads), state)
    # The RMS of AdamW's updates is about 0.2. That of an orthogonal matrix is 1 / sqrt(its longer side).
    rows = {shape: iter(0.2 * max(x.shape[1:]) ** 0.5 * x) for shape, x in stacks.items()}
    return jax.tree.map(lambda g: next(rows[str(matrix(g).shape)]).reshape(g.shape), grads), state

  return optax.GradientTransformation(lambda params: muon.init(stack(params)), update)


def for_strict_promotion(corrected: optax.GradientTransformation) -> optax.GradientTransformation:
  """Makes optax's bias correction, a float to an integer power, work under strict dtype promotion."""

  def update(grads, state, params=None):
    with jax.numpy_dtype_promotion('standard'):
      return corrected.update(grads, state, params)

  return optax.GradientTransformation(corrected.init, update)


def _parts(params):
  """'predictor' for the parameters of the predictor, otherwise 'others'."""
  inside = lambda path: any(getattr(part, 'key', None) == 'predictor' for part in path)
  return jax.tree_util.tree_map_with_path(lambda path, _: 'predictor' if inside(path) else 'others', params)


OPTIMIZERS: dict[str, Callable[[Mapping, optax.Schedule], optax.GradientTransformation]] = {
  'sgd': sgd,
  'lars': lars,
  'adamw': adamw,
  'muon': muon,
}


def create(optimizer: Mapping, schedule: optax.Schedule, peak: float | None = None) -> optax.GradientTransformation:
  """The optimizer for the config section `optimizer`.

  With `fixed_predictor`, the learning rate of the predictor is always `peak`.
  """
  check(optimizer)
  make = OPTIMIZERS[optimizer['name']]
  made = make(optimizer, schedule)
  if optimizer['fixed_predictor']:
    assert peak is not None
    made = optax.multi_transform({'others': made, 'predictor': make(optimizer, optax.constant_schedule(peak))}, _parts)
  # Chain only if clipping is on: a chain changes the optimizer state, and earlier checkpoints have none.
  return optax.chain(optax.clip_by_global_norm(optimizer['clip']), made) if optimizer['clip'] else made
