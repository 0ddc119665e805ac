"""Temperatures: functions of the similarity, schedules over the steps, and learnable and adaptive temperatures.

A loss takes a `Temperature`: a number, an array (a scalar, or `[Q]` with one value per query), or an elementwise
function `s -> tau` of the similarity. `scale` divides similarities by a temperature and decides about its gradient: a
function receives the similarity with its gradient stopped, as in DySTreSS Alg. 3, unless it is wrapped in
`with_gradient`.

Papers: DySTreSS (Manna et al. 2024), the schedule of Kukleva et al. 2023, MACL (Huang et al. 2023), CLIP (Radford et
al. 2021).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.registry import (
  Found,
  concrete,
  find,
  is_mapping,
  plain,
  prefix,
  require,
  require_bool,
  require_positive,
  show,
)
from ssl_jax.stream import Stream

Temperature = float | jax.Array | Callable[[jax.Array], jax.Array]


def scale(s: jax.Array, temperature: Temperature) -> jax.Array:
  """s / tau.  [Q, ...] -> [Q, ...]

  tau is a number, an array (a scalar, one value per row of s, or one per similarity), or a function of s. For a
  `Stream`, the result is a `Stream`.

  >>> print(scale(jnp.array([-1.0, 0.0, 1.0]), cosine(0.1, 0.2)).round(3))
  [-5.  0.  5.]
  """
  if isinstance(s, Stream):
    return _scaled_stream(s, temperature)
  check_temperature(temperature)
  if callable(temperature):
    return s / temperature(s if isinstance(temperature, with_gradient) else jax.lax.stop_gradient(s))
  tau = jnp.asarray(temperature, s.dtype)
  if tau.shape != np.shape(s):
    tau = jnp.asarray(for_queries(tau, len(s) if np.ndim(s) else 1))
    tau = tau.reshape(-1, *(1,) * (np.ndim(s) - 1)) if tau.ndim else tau
  return s / tau


def check_temperature(temperature: Temperature) -> None:
  """Raises a ValueError for a schedule, and for a number that is not positive and finite. Tracers are not checked.

  >>> check_temperature(np.array([0.1, 0.2]))
  """
  if isinstance(temperature, OfStep):
    raise ValueError('temperature is a schedule of the step, not a function of the similarity: pass schedule(step)')
  if temperature is macl:
    raise ValueError('temperature = macl is a function of the positives: pass macl(pos)')
  if isinstance(temperature, Schedule):
    raise ValueError(
      'temperature is the temperature of a run, not a function of the similarity: pass schedule.at(params, step)'
    )
  if callable(temperature):
    if any(temperature is made for made in (*OF_SIMILARITY.values(), *OF_STEP.values())):
      name = temperature.__name__
      raise ValueError(f'temperature = {name} is not called: pass {name}(...), such as cosine(0.07, 0.2)')
    return
  if np.ndim(temperature) == 0:
    require_positive(temperature=temperature)
  elif not isinstance(temperature, jax.core.Tracer):
    tau = np.asarray(temperature, np.float32)
    if len(wrong := tau[~((tau > 0) & (tau < np.inf))]):
      raise ValueError(f'temperature = {wrong[0]:g} for one of the queries must be positive and finite')


def for_queries(temperature: Temperature, count: int) -> Any:
  """Checks a temperature. Returns a function unchanged, and anything else as a scalar or as an array `[count]`.

  >>> for_queries(np.array([[0.1]]), 8).shape, for_queries([0.1, 0.2], 2).shape
  ((), (2,))
  """
  check_temperature(temperature)
  if callable(temperature) or np.ndim(temperature) == 0:
    return temperature
  tau = jnp.asarray(temperature)
  if tau.size == 1:
    return tau.reshape(())
  if (len(tau), tau.size) != (count, count):
    raise ValueError(f'temperature has shape {tau.shape}, but there are {count} queries: give a number, or one each')
  return tau.reshape(count)


def _scaled_stream(s: Stream, temperature: Temperature) -> Any:
  tau = for_queries(temperature, len(s.source.queries))
  if callable(tau) or np.ndim(tau) == 0:
    return s.apply(lambda x: scale(x, tau))
  return s / tau.astype(s.source.queries.dtype)


@dataclasses.dataclass(frozen=True)
class with_gradient:
  """Lets the gradient flow through a temperature function, as in DySTreSS Eq. 6-7.

  >>> print(jax.grad(scale)(0.5, with_gradient(linear(0.1, 0.3))).round(3))  # (tau - s tau') / tau^2
  2.5
  """

  function: Callable[[jax.Array], jax.Array]

  def __post_init__(self):
    check_temperature(self.function)

  def __call__(self, s: jax.Array) -> jax.Array:
    return self.function(s)


# Functions of the similarity.


def constant(tau: float) -> Temperature:
  """tau(s) = tau.

  >>> print(constant(0.5)(jnp.zeros(2)))
  [0.5 0.5]
  """
  require_positive(tau=tau)
  return lambda s: jnp.full_like(s, tau)


def cosine(tau_min: float, tau_max: float) -> Temperature:
  """tau_min + (tau_max - tau_min) (1 + cos(pi (1 + s))) / 2: lowest at s = 0, highest at s = ±1 (DySTreSS, Alg. 1).

  >>> print(cosine(0.1, 0.2)(jnp.array([-1.0, 0.0, 0.5])).round(3))
  [0.2  0.1  0.15]
  """
  _ordered(tau_min, tau_max)
  return lambda s: _between(tau_min, tau_max, (1 + jnp.cos(jnp.pi * (1 + s))) / 2)


def shifted_cosine(tau_min: float, tau_max: float, shift: float, scale: float) -> Temperature:
  """tau_min + (tau_max - tau_min) (1 + cos(pi (shift + s) / scale)) / 2 on one side of s = -shift (DySTreSS, Alg. 2).

  If shift <= 0, that side is s <= -shift, and the lowest temperature is at -shift - scale. If shift > 0, it is
  s >= -shift, and the lowest temperature is at -shift + scale. On the other side, tau is tau_max. With a shift of 0,
  the curve is on the side s <= 0 ("version 3" of sec. 5.8); Alg. 2 as printed would have it on both sides. With
  scale = (1 + |shift|) / 2, as in Table 15, tau(±1) = tau_max.

  >>> print(shifted_cosine(0.1, 0.2, shift=-0.4, scale=0.7)(jnp.array([-1.0, -0.3, 0.7])).round(3))
  [0.2 0.1 0.2]
  """
  _ordered(tau_min, tau_max)
  require_positive(scale=scale)
  require('shift', shift, lambda x: -1 <= x <= 1, 'in [-1, 1]')

  def temperature(s):
    inside = jnp.where(shift > 0, s >= -shift, s <= -shift)
    return _between(tau_min, tau_max, jnp.where(inside, (1 + jnp.cos(jnp.pi * (shift + s) / scale)) / 2, 1))

  return temperature


def linear(tau_min: float, tau_max: float) -> Temperature:
  """tau_min + (tau_max - tau_min) |s| (DySTreSS, Table 10, which prints no formula).

  >>> print(linear(0.1, 0.2)(jnp.array([-1.0, 0.0, 0.5])).round(3))
  [0.2  0.1  0.15]
  """
  _ordered(tau_min, tau_max)
  return lambda s: _between(tau_min, tau_max, jnp.abs(s))


def exponential(tau_min: float, tau_max: float, rate: float = 1.0) -> Temperature:
  """tau_min + (tau_max - tau_min) (e^(rate |s|) - 1) / (e^rate - 1) (DySTreSS, Table 10, which prints no formula).

  The curve is convex for a positive rate and concave for a negative one. The authors' code has 0.2 - 0.1 e^(-3.5 |s|),
  which is exponential(0.1, 0.2 - 0.1 e^(-3.5), rate=-3.5).

  >>> print(exponential(0.1, 0.2)(jnp.array([-1.0, 0.0])).round(3))
  [0.2 0.1]
  >>> print(exponential(0.1, 0.2 - 0.1 * math.exp(-3.5), rate=-3.5)(jnp.array([0.0, 0.3])).round(3))
  [0.1   0.165]
  """
  _ordered(tau_min, tau_max)
  require('rate', rate, lambda x: x != 0 and math.isfinite(x), 'finite and not 0')
  maximum = jnp.maximum if isinstance(rate, jax.Array) else max
  # In this form, no exponential overflows. 1e-6 avoids 0 / 0 where a schedule of the rate passes through 0.
  down, up = maximum(abs(rate), 1e-6), maximum(rate, 0.0)

  def fraction(x):
    return jnp.exp(up * (x - 1)) * jnp.expm1(-down * x) / jnp.expm1(-down)

  return lambda s: _between(tau_min, tau_max, fraction(jnp.abs(s)))


def monotonic_cosine(tau_min: float, tau_max: float) -> Temperature:
  """tau_min + (tau_max - tau_min) (1 - cos(pi (1 + s) / 2)) / 2: lowest at s = -1, highest at s = 1 (DySTreSS, App. C).

  >>> print(monotonic_cosine(0.1, 0.2)(jnp.array([-1.0, 0.0, 1.0])).round(3))
  [0.1  0.15 0.2 ]
  """
  _ordered(tau_min, tau_max)
  return lambda s: _between(tau_min, tau_max, (1 - jnp.cos(jnp.pi * (1 + s) / 2)) / 2)


def ode_solution(delta: float, k: float, c: float) -> Temperature:
  """s / log(delta k s - c), the solution of the differential equation of DySTreSS (Eq. 13-14), for its Fig. 2.

  tau(-1) = tau_max at c = -delta k - exp(-1 / tau_max), and tau(1) = tau_max at c = delta k - exp(1 / tau_max), where
  Eq. 15 misprints the sign of delta k. It can be negative or infinite, so use it for plots, not for training.

  >>> print(ode_solution(0.1, 1.0, c=0.1 - math.exp(1 / 0.2))(1.0).round(3))
  0.2
  """
  return lambda s: s / jnp.log(delta * k * s - c)


# Schedules: functions of the step, as in optax.


@dataclasses.dataclass(frozen=True)
class OfStep:
  """A function of the step. Its type distinguishes it from a function of the similarity.

  `turns` are the steps at which the function has its extremes.

  >>> print(OfStep(lambda step: 0.1 * step, turns=(0, 1))(1))
  0.1
  """

  function: Callable[[jax.typing.ArrayLike], jax.Array]
  turns: tuple[float, ...]

  def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
    return self.function(step)


def linear_schedule(
  start: float,
  end: float,
  epochs: float | None = None,
  *,
  steps_per_epoch: float = 1,
  total_steps: float | None = None,
) -> OfStep:
  """Linear from start to end over `epochs` (None: all `total_steps` of training), then constant.

  It can be the temperature or any argument of one. As the tau_min of `cosine`, it raises the lowest temperature during
  training, which DySTreSS calls "stabilisation".

  >>> print(linear_schedule(0.1, 0.2, epochs=10, steps_per_epoch=2)(5).round(3))
  0.125
  """
  for name, value in (('start', start), ('end', end)):
    require(name, value, lambda x: -math.inf < x < math.inf, 'a finite number')
  steps = _steps('epochs', epochs, steps_per_epoch, total_steps)
  return OfStep(lambda step: _between(start, end, jnp.clip(_as_float(step) / steps, 0, 1)), turns=(0, steps))


def cosine_schedule(
  tau_min: float,
  tau_max: float,
  period: float | None = None,
  *,
  steps_per_epoch: float = 1,
  total_steps: float | None = None,
) -> OfStep:
  """tau_min + (tau_max - tau_min) (1 + cos(2 pi step / period)) / 2, period in epochs (Kukleva et al. 2023).

  It starts at tau_max. The paper's code has tau_min 0.1, tau_max 1.0 and a period of 400 epochs (cos(pi epoch / 200)),
  and updates once per epoch; this schedule updates every step. A period of None is all `total_steps` of training.

  >>> print(cosine_schedule(0.1, 1.0, period=200)(jnp.array([0, 50, 100])).round(3))
  [1.   0.55 0.1 ]
  """
  _ordered(tau_min, tau_max)
  steps = _steps('period', period, steps_per_epoch, total_steps)
  wave = lambda step: (1 + jnp.cos(2 * jnp.pi * (_as_float(step) / steps % 1))) / 2
  return OfStep(lambda step: _between(tau_min, tau_max, wave(step)), turns=(0, steps / 2))


def _steps(name: str, epochs: float | None, steps_per_epoch: float, total_steps: float | None) -> float:
  """The steps of a duration in epochs; None is the length of training."""
  if epochs is not None:
    require_positive(**{name: epochs})
    return epochs * steps_per_epoch
  if total_steps is None:
    raise ValueError(f'{name} = None is the length of training, which is not known here: give {name} or total_steps')
  return total_steps


def macl(
  pos: jax.Array, *, tau0: float = 0.1, alpha: float = 0.5, threshold: float = 0.0, axis_name: str | None = None
) -> jax.Array:
  """tau0 (1 + alpha (A - threshold)), A the mean similarity of the positives (MACL, Huang et al. 2023).  [Q, K] -> []

  The alignment A is the mean over all devices of `axis_name`, and its gradient is stopped. The temperature is at least
  tau0 / 100; the formula is lower only for a large alpha or threshold.

  >>> print(macl(jnp.array([0.9, 0.7])).round(3))
  0.14
  """
  require_positive(tau0=tau0)
  require('alpha', alpha, lambda x: 0 <= x < math.inf, 'at least 0 and finite')
  require('threshold', threshold, math.isfinite, 'a finite number')
  alignment = jnp.mean(jax.lax.stop_gradient(pos))
  if axis_name is not None:
    alignment = jax.lax.pmean(alignment, axis_name)
  return tau0 * jnp.maximum(1 + alpha * (alignment - threshold), 0.01)


class Schedule(NamedTuple):
  """The temperature of a run: `at(params, step)` is its value at a step, `init()` its learnable parameters, if any.

  `turns` are the steps at which the temperature has its extremes.

  >>> from_config(0.2).at({}, 0), learnable().init().keys()
  (0.2, dict_keys(['log_inverse_tau']))
  """

  init: Callable[[], dict[str, Any]]
  at: Callable[[Mapping[str, Any], jax.typing.ArrayLike], Temperature | None]
  turns: tuple[float, ...] = (0,)

  @property
  def of_similarity(self) -> bool:
    """Whether the temperature is a function of the similarity."""
    return callable(self.at(self.init(), 0))


def learnable(tau: float = 0.07, tau_min: float = 0.01, tau_max: float = 1.0) -> Schedule:
  """A learnable scalar, exp(-log_inverse_tau), kept in [tau_min, tau_max] (CLIP, which keeps it at or above 0.01).

  CLIP clips the parameter after each update. Here the value is clipped; outside the range, the parameter receives only
  gradients that move it back into the range. Gradients are reverse-mode only: `jax.jvp` does not work.

  >>> schedule = learnable(tau=0.07)
  >>> print(schedule.at(schedule.init(), step=0).round(3))
  0.07
  """
  _ordered(tau_min, tau, names=('tau_min', 'tau'))
  _ordered(tau, tau_max, names=('tau', 'tau_max'))
  low, high = -math.log(tau_max), -math.log(tau_min)
  return Schedule(
    init=lambda: {'log_inverse_tau': jnp.asarray(-math.log(tau), jnp.float32)},
    at=lambda params, step: jnp.exp(-_clip(params['log_inverse_tau'], low, high)),
  )


# From a config.

OF_SIMILARITY = {f.__name__: f for f in (constant, cosine, shifted_cosine, linear, exponential, monotonic_cosine)}
OF_STEP = {f.__name__: f for f in (linear_schedule, cosine_schedule, learnable)}


def from_config(
  spec: Mapping[str, Any] | float | None,
  *,
  steps_per_epoch: float = 1,
  total_steps: float | None = None,
  section: str = 'temperature',
  axis_name: str | None = None,
) -> Schedule:
  """The temperature that a config section names, with every argument checked.

  `spec` holds the name of a function in this module and its arguments; durations are in epochs. An argument of
  `constant` or of another function of the similarity is a number or a mapping for a schedule or for `learnable`. All
  functions of the similarity but `constant` take `gradient=True` (see `with_gradient`). If `spec` is None or its name
  is 'none', the temperature is None, for a loss that takes no temperature. `axis_name` is the axis of the devices that
  share a learnable temperature: at a bound of its range, the mean of their gradients decides whether it moves.

  >>> spec = dict(name='cosine', tau_min=dict(name='linear_schedule', start=0.1, end=0.2, epochs=10), tau_max=0.2)
  >>> print(from_config(spec).at({}, step=5)(0.0).round(3))
  0.15
  """
  clock: dict[str, Any] = dict(steps_per_epoch=steps_per_epoch, total_steps=total_steps)
  if spec is None or (is_mapping(spec) and spec.get('name') == 'none'):
    return Schedule(dict, lambda params, step: None)
  if not is_mapping(spec):
    require_positive(**{section: spec})
    return _number(section, spec)
  spec = plain(spec)
  if not isinstance(spec.get('name'), str):
    find(section, spec, OF_SIMILARITY | OF_STEP)  # raises an error that explains what is wrong with the name
  if spec['name'] not in OF_STEP:
    return _of_similarity(section, spec, clock, axis_name)
  schedule = _of_step(section, spec, clock, axis_name)
  with prefix(section):
    require_positive(**{key: spec[key] for key in ('start', 'end') if key in spec})
  return schedule


def _number(path: str, value: Any) -> Schedule:
  if isinstance(value, bool) or not isinstance(value, int | float | np.number):
    fix = "give a number or {'name': 'linear_schedule', ...}"
    raise ValueError(f'{path} = {show(value)} is not a number: {fix}')
  return Schedule(dict, lambda params, step: float(value))


def _of_step(path: str, spec: Mapping[str, Any], clock: Mapping[str, Any], axis_name: str | None) -> Schedule:
  found = find(path, spec, OF_STEP, given=clock)
  with prefix(path):
    if found.name == 'learnable':
      learned = learnable(**found.parameters)
      return Schedule(learned.init, lambda params, step: _mean_gradient(learned.at(params, step), axis_name))
    schedule = found.entry(**found.parameters, **clock)
  return Schedule(dict, lambda params, step: schedule(step), schedule.turns)


def _of_similarity(path: str, spec: dict[str, Any], clock: Mapping[str, Any], axis_name: str | None) -> Schedule:
  gradient = spec.pop('gradient', False) if spec.get('name') != 'constant' else False
  require_bool(f'{path}.gradient', gradient)
  found = find(path, spec, OF_SIMILARITY | OF_STEP)
  children = {
    key: _of_step(f'{path}.{key}', value, clock, axis_name) if is_mapping(value) else _number(f'{path}.{key}', value)
    for key, value in found.parameters.items()
  }
  turns = tuple(sorted({0, clock['total_steps'] or 0, *(turn for child in children.values() for turn in child.turns)}))

  def init():
    return {key: params for key, child in children.items() if (params := child.init())}

  def values(params, step):
    return {key: child.at(params.get(key, {}), step) for key, child in children.items()}

  def at(params, step):
    if found.name == 'constant':
      return values(params, step)['tau']
    temperature = found.entry(**values(params, step))
    return with_gradient(temperature) if gradient else temperature

  _check_extremes(path, found, values, init(), turns)
  if not any(map(is_mapping, found.parameters.values())):  # one object for all steps, to avoid retracing
    fixed = at({}, 0)
    return Schedule(dict, lambda params, step: fixed)
  return Schedule(init, at, turns)


def _check_extremes(path: str, found: Found, values: Callable, params: Any, turns: tuple[float, ...]) -> None:
  """Calls the function at the extremes of its schedules and learned ranges; it checks its own arguments."""
  # An infinite shift moves each learnable parameter beyond its range, where its value is clipped to a bound.
  shifts = (0, math.inf, -math.inf) if params else (0,)
  with prefix(path):
    for step in turns:
      for shift in shifts:
        found.entry(**values(jax.tree.map(lambda x, shift=shift: x + shift, params), step))


def _ordered(low: Any, high: Any, names: tuple[str, str] = ('tau_min', 'tau_max')) -> None:
  for name, value in zip(names, (low, high), strict=True):
    if isinstance(value, OfStep):
      raise ValueError(f'{name} is a schedule of the step: pass {name}=schedule(step)')
    require_positive(**{name: value})
  traced = isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer)
  if not traced and concrete(low) > concrete(high):
    raise ValueError(f'{names[0]} = {show(low)} must not exceed {names[1]} = {show(high)}')


def _between(start: Any, end: Any, fraction: jax.Array) -> jax.Array:
  start, end = jnp.asarray(start, fraction.dtype), jnp.asarray(end, fraction.dtype)
  return start + (end - start) * fraction


def _as_float(step: jax.typing.ArrayLike) -> jax.Array:
  return jnp.asarray(step, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _clip(x: jax.Array, low: float, high: float) -> jax.Array:
  return jnp.clip(x, low, high)


def _clip_bwd(low, high, x, g):
  outwards = ((x >= high) & (g < 0)) | ((x <= low) & (g > 0))  # gradient descent moves x by -g
  return (jnp.where(outwards, 0, g),)


_clip.defvjp(lambda x, low, high: (_clip(x, low, high), x), _clip_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _mean_gradient(x: jax.Array, axis_name: str | None) -> jax.Array:
  """Returns x, with its gradient averaged over the devices, so that the bounds of its range apply to that average."""
  return x


_mean_gradient.defvjp(
  lambda x, axis_name: (x, None), lambda axis_name, _, g: (jax.lax.pmean(g, axis_name) if axis_name else g,)
)
