"""Optimisers, learning-rate schedules, and which parameters they leave alone."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax


def peak_rate(optimizer: Mapping, batch_size: int) -> float:
  """The learning rate at its highest: as given, ·batch/256 (linear), or ·sqrt(batch) (sqrt)."""
  scale = {'none': 1.0, 'linear': batch_size / 256, 'sqrt': batch_size**0.5}[optimizer['scaling']]
  return optimizer['learning_rate'] * scale


def rate(optimizer: Mapping, *, batch_size: int, steps_per_epoch: int, total_steps: int) -> optax.Schedule:
  """step -> learning rate: linear warm-up, then a cosine or a line to zero, steps at the milestones, or constant."""
  peak = peak_rate(optimizer, batch_size)
  warmup = round(optimizer['warmup_epochs'] * steps_per_epoch)
  if warmup >= total_steps and warmup:
    raise ValueError(
      f'optimizer.warmup_epochs = {optimizer["warmup_epochs"]} is {warmup} steps, and the run has {total_steps}: '
      'set it to 0, or make the run longer'
    )
  if optimizer['schedule'] == 'cosine':
    after = optax.cosine_decay_schedule(peak, total_steps - warmup)
  elif optimizer['schedule'] == 'linear':
    after = optax.linear_schedule(peak, 0.0, total_steps - warmup)
  elif optimizer['schedule'] == 'step':
    boundaries = {round(m * steps_per_epoch) - warmup: optimizer['decay'] for m in optimizer['milestones']}
    after = optax.piecewise_constant_schedule(peak, boundaries)
  else:
    after = optax.constant_schedule(peak)
  schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
  return lambda step: schedule(jnp.asarray(step, jnp.float32))  # optax mixes the step with floats


def decayed(params):
  """True for weights; False for biases, norms and scalars, which have fewer than two dimensions."""
  return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def _learned(params):
  """True for all but a learned temperature, which no decay should pull to 1, and a ViT's frozen patch projection."""
  left_alone = lambda path: any(getattr(part, 'key', None) in ('temperature', 'patch_embed') for part in path)
  return jax.tree_util.tree_map_with_path(lambda path, _: not left_alone(path), params)


def _decay_mask(exempt: bool):
  both = lambda params: jax.tree.map(lambda a, b: a and b, decayed(params), _learned(params))
  return both if exempt else _learned


def lars(schedule: optax.Schedule, *, momentum: float, weight_decay: float, exempt: bool, trust: float = 0.001):
  """LARS (You et al. 2017), as optax has it: each weight's step is scaled by trust·|w| / |g + decay·w|.

  The paper's own denominator is |g| + decay·|w|, the same but for a large decay.
  """
  ratio = optax.masked(optax.scale_by_trust_ratio(trust_coefficient=trust), _decay_mask(exempt))
  # The momentum gathers updates that already carry their rate, as in the paper and in optax.lars.
  return optax.chain(
    optax.add_decayed_weights(weight_decay, _decay_mask(exempt)),
    ratio,
    optax.scale_by_learning_rate(schedule),
    optax.trace(momentum),
  )


def sgd(schedule: optax.Schedule, *, momentum: float, weight_decay: float, exempt: bool):
  """torch's SGD: the decay joins the gradient, the momentum gathers it, the rate comes last."""
  decay = optax.add_decayed_weights(weight_decay, _decay_mask(exempt))
  return optax.chain(decay, optax.trace(momentum), optax.scale_by_learning_rate(schedule))


def for_strict_promotion(adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """optax's Adams raise a float to an integer to correct their bias: this one does where that is forbidden, too."""

  def update(grads, state, params=None):
    with jax.numpy_dtype_promotion('standard'):
      return adam.update(grads, state, params)

  return optax.GradientTransformation(adam.init, update)


def create(optimizer: Mapping, schedule: optax.Schedule) -> optax.GradientTransformation:
  """The optimiser of the config's `optimizer` section."""
  decay, exempt = optimizer['weight_decay'], optimizer['exempt']
  if optimizer['name'] == 'adamw':
    b1, b2 = optimizer['betas']
    made = for_strict_promotion(optax.adamw(schedule, b1=b1, b2=b2, weight_decay=decay, mask=_decay_mask(exempt)))
  else:
    make = {'sgd': sgd, 'lars': lars}[optimizer['name']]
    made = make(schedule, momentum=optimizer['momentum'], weight_decay=decay, exempt=exempt)
  # The others' states have no place for a clip, and runs that go on have theirs saved.
  return optax.chain(optax.clip_by_global_norm(optimizer['clip']), made) if optimizer['clip'] else made
