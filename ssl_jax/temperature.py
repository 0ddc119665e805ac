"""Temperatures: functions of the similarity, schedules of the step, learnable and adaptive ones.

A loss takes a `Temperature`: a number, an array (a scalar, or `[Q]` with one value a query), or a function `s -> tau`
of the similarity, elementwise. Whatever it is, `scale` is the one place that divides a similarity by it, and the one
place that decides about its gradient: a function sees the similarity with its gradient stopped, as in DySTreSS Alg. 3,
unless it is wrapped in `with_gradient`.

Papers: DySTreSS (Manna et al. 2024), the schedule of Kukleva et al. 2023, MACL (Huang et al. 2023), CLIP (Radford et
al. 2021).
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax.names import nearest

Temperature = float | jax.Array | Callable[[jax.Array], jax.Array]


def scale(s: jax.Array, temperature: Temperature) -> jax.Array:
  """s / tau, where tau is a number, an array (a scalar or one value a row of s) or tau(s).  [Q, ...] -> [Q, ...]

  >>> print(scale(jnp.array([-1.0, 0.0, 1.0]), cosine(0.1, 0.2)).round(3))
  [-5.  0.  5.]
  """
  if callable(temperature):
    return s / temperature(s if isinstance(temperature, with_gradient) else jax.lax.stop_gradient(s))
  if np.ndim(temperature) == 0:
    require_positive(temperature=temperature)
  tau = jnp.asarray(temperature, s.dtype)
  if tau.ndim > s.ndim or any(n not in (1, size) for n, size in zip(tau.shape, s.shape, strict=False)):
    raise ValueError(
      f'temperature has shape {tau.shape}, and the similarities {s.shape}: give a number, or one a query'
    )
  return s / (tau.reshape(tau.shape + (1,) * (s.ndim - tau.ndim)) if tau.ndim else tau)


@dataclasses.dataclass(frozen=True)
class with_gradient:
  """Lets the gradient flow through a temperature function, which gives the gradients of DySTreSS Eq. 6-7.

  >>> print(jax.grad(scale)(0.5, with_gradient(linear(0.1, 0.3))).round(3))  # (tau - s tau') / tau^2
  2.5
  """

  function: Callable[[jax.Array], jax.Array]

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

  That side is s <= -shift when shift <= 0 and s >= -shift when shift > 0; on the other side tau is tau_max. The lowest
  temperature is at -shift ∓ scale. A shift of 0 puts the whole curve in the left half plane ("version 3" of sec. 5.8),
  where Alg. 2 as printed would put it in both. With scale = (1 + |shift|) / 2, as in Table 15, tau(±1) = tau_max.

  >>> print(shifted_cosine(0.1, 0.2, shift=-0.4, scale=0.7)(jnp.array([-1.0, -0.3, 0.7])).round(3))
  [0.2 0.1 0.2]
  """
  _ordered(tau_min, tau_max)
  require_positive(scale=scale)
  require('shift', shift, lambda x: -1 <= x <= 1, 'give a shift in [-1, 1]')

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

  >>> print(exponential(0.1, 0.2)(jnp.array([-1.0, 0.0])).round(3))
  [0.2 0.1]
  """
  _ordered(tau_min, tau_max)
  require_positive(rate=rate)
  return lambda s: _between(tau_min, tau_max, jnp.expm1(rate * jnp.abs(s)) / jnp.expm1(rate))


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
  Eq. 15 misprints the sign of delta k. Nothing keeps it positive or finite: it is a curve to plot, not to train with.

  >>> print(ode_solution(0.1, 1.0, c=0.1 - math.exp(1 / 0.2))(1.0).round(3))
  0.2
  """
  return lambda s: s / jnp.log(delta * k * s - c)


# Schedules: functions of the step, as in optax.


def linear_schedule(
  start: float, end: float, epochs: float | None = None, *, steps_per_epoch: float = 1, total_steps: float = 1
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
  """From start to end in `epochs` (None: the whole training), then end: of a temperature, or of any argument of one.

  As the tau_min of `cosine` it raises the least temperature during training, DySTreSS's "stabilisation".

  >>> print(linear_schedule(0.1, 0.2, epochs=10, steps_per_epoch=2)(5).round(3))
  0.125
  """
  for name, value in (('start', start), ('end', end)):
    require(name, value, lambda x: -math.inf < x < math.inf, 'give a finite number')
  require_positive(epochs=1 if epochs is None else epochs)
  steps = total_steps if epochs is None else epochs * steps_per_epoch
  return lambda step: _between(start, end, jnp.clip(_as_float(step) / steps, 0, 1))


def cosine_schedule(
  tau_min: float, tau_max: float, period: float | None = None, *, steps_per_epoch: float = 1, total_steps: float = 1
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
  """tau_min + (tau_max - tau_min) (1 + cos(2 pi step / period)) / 2, period in epochs (Kukleva et al. 2023).

  It starts at tau_max. The paper's code has tau_min 0.1, tau_max 1.0 and a period of 400 epochs (cos(pi epoch / 200)),
  and moves once an epoch; this moves every step. A period of None is the whole training.

  >>> print(cosine_schedule(0.1, 1.0, period=200)(jnp.array([0, 50, 100])).round(3))
  [1.   0.55 0.1 ]
  """
  _ordered(tau_min, tau_max)
  require_positive(period=1 if period is None else period)
  steps = total_steps if period is None else period * steps_per_epoch
  return lambda step: _between(tau_min, tau_max, (1 + jnp.cos(2 * jnp.pi * (_as_float(step) / steps % 1))) / 2)


def macl(
  pos: jax.Array, *, tau0: float = 0.1, alpha: float = 0.5, threshold: float = 0.0, axis_name: str | None = None
) -> jax.Array:
  """tau0 (1 + alpha (A - threshold)), A the mean similarity of the positives (MACL, Huang et al. 2023).  [Q, K] -> []

  The alignment A is the mean over all devices of `axis_name`, and no gradient passes. Where alpha is so large that
  the temperature would reach 0 for opposite positives, it stays at tau0 / 100.

  >>> print(macl(jnp.array([0.9, 0.7])).round(3))
  0.14
  """
  require_positive(tau0=tau0)
  require('alpha', alpha, lambda x: 0 <= x <= 1, 'give an alpha in [0, 1]')
  require('threshold', threshold, math.isfinite, 'give a finite number')
  alignment = jnp.mean(jax.lax.stop_gradient(pos))
  if axis_name is not None:
    alignment = jax.lax.pmean(alignment, axis_name)
  return tau0 * jnp.maximum(1 + alpha * (alignment - threshold), 0.01)


class Schedule(NamedTuple):
  """A temperature of the training: `at(params, step)` is the temperature of a step, `init()` its parameters, if any.

  >>> from_config(0.2).at({}, 0), learnable().init().keys()
  (0.2, dict_keys(['log_inverse_tau']))
  """

  init: Callable[[], dict[str, Any]]
  at: Callable[[Mapping[str, Any], jax.typing.ArrayLike], Temperature | None]


def learnable(tau: float = 0.07, tau_min: float = 0.01, tau_max: float = 1.0) -> Schedule:
  """A learned scalar, exp(-log_inverse_tau), kept in [tau_min, tau_max] (CLIP, which keeps it at or above 0.01).

  CLIP clips the parameter after each update. Here the value is clipped, and outside of the range the parameter receives
  only the gradient that leads back into it.

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

_OF_SIMILARITY = {f.__name__: f for f in (constant, cosine, shifted_cosine, linear, exponential, monotonic_cosine)}
_OF_STEP = {f.__name__: f for f in (linear_schedule, cosine_schedule, learnable)}
_CLOCK = ('steps_per_epoch', 'total_steps')


def from_config(
  spec: Mapping[str, Any] | float | None, *, steps_per_epoch: float = 1, total_steps: float = 1
) -> Schedule:
  """The temperature that a config names, with every argument checked.

  `spec` has the name of a function of this module and its arguments, durations in epochs. An argument of `constant` or
  of a function of the similarity is a number or again such a mapping: a schedule, or `learnable`. A function of the
  similarity takes `gradient=True` (see `with_gradient`). A `spec` of None gives None, for a loss without a temperature.

  >>> spec = dict(name='cosine', tau_min=dict(name='linear_schedule', start=0.1, end=0.2, epochs=10), tau_max=0.2)
  >>> print(from_config(spec).at({}, step=5)(0.0).round(3))
  0.15
  """
  clock = dict(steps_per_epoch=steps_per_epoch, total_steps=total_steps)
  if spec is None:
    return Schedule(dict, lambda params, step: None)
  if not is_mapping(spec):
    number = _number('temperature', spec)
    require_positive(temperature=spec)
    return number
  if spec.get('name') in _OF_STEP:
    schedule = _of_step('temperature', spec, clock)
    with prefix('temperature'):
      require_positive(**{key: spec[key] for key in ('start', 'end') if key in spec})
    return schedule
  return _of_similarity('temperature', spec, clock)


def _number(path: str, value: Any) -> Schedule:
  if isinstance(value, bool) or not isinstance(value, int | float | np.number):
    raise ValueError(f"{path} = {value!r} is not a number: give a number or dict(name='linear_schedule', ...)")
  return Schedule(dict, lambda params, step: float(value))


def _of_step(path: str, spec: Mapping[str, Any], clock: Mapping[str, float]) -> Schedule:
  arguments = dict(spec)
  name, function = lookup(path, arguments.pop('name', None), _OF_STEP)
  check_arguments(path, name, function, arguments, skip=_CLOCK)
  with prefix(path):
    if name == 'learnable':
      return learnable(**arguments)
    schedule = function(**arguments, **clock)
  return Schedule(dict, lambda params, step: schedule(step))


def _of_similarity(path: str, spec: Mapping[str, Any], clock: Mapping[str, float]) -> Schedule:
  arguments = dict(spec)
  name, function = lookup(path, arguments.pop('name', None), _OF_SIMILARITY | _OF_STEP)
  gradient = name != 'constant' and arguments.pop('gradient', False)
  require_bool(f'{path}.gradient', gradient)
  check_arguments(path, name, function, arguments)
  children = {
    key: _of_step(f'{path}.{key}', value, clock) if is_mapping(value) else _number(f'{path}.{key}', value)
    for key, value in arguments.items()
  }

  def init():
    return {key: params for key, child in children.items() if (params := child.init())}

  def values(params, step):
    return {key: child.at(params.get(key, {}), step) for key, child in children.items()}

  def at(params, step):
    if name == 'constant':
      return values(params, step)['tau']
    temperature = function(**values(params, step))
    return with_gradient(temperature) if gradient else temperature

  # The functions check their own arguments: it is enough to call them along the training, and with a learned argument
  # at the ends of its range.
  durations = [v.get('epochs', v.get('period')) or 0 for v in arguments.values() if is_mapping(v)]
  last = max([clock['total_steps'], *(clock['steps_per_epoch'] * duration for duration in durations)])
  steps = [*np.linspace(0, last, 33), *(clock['steps_per_epoch'] * duration / 2 for duration in durations)]
  with prefix(path):
    for step in steps if durations else [0]:
      for end in (0, math.inf, -math.inf) if init() else [0]:
        function(**values(jax.tree.map(lambda x, end=end: x + end, init()), step))
  if not any(map(is_mapping, arguments.values())):  # always the same one, for which nothing is compiled twice
    fixed = at({}, 0)
    return Schedule(dict, lambda params, step: fixed)
  return Schedule(init, at)


# Checks, shared with `losses.from_config`. Each message is one line: the argument, its value, the mend.


def require(name: str, value: Any, holds: Callable[[Any], bool], mend: str) -> None:
  """Raises a ValueError unless `holds(value)`. A value known only inside jit is not looked at.

  >>> require('fraction', 0.5, lambda x: 0 < x <= 1, 'give a fraction in (0, 1]')
  """
  if isinstance(value, jax.core.Tracer):
    return
  try:
    fine = bool(holds(value))
  except (TypeError, ValueError):
    fine = False
  if not fine:
    raise ValueError(f'{name} = {_show(value)} is out of range: {mend}')


def require_positive(**values: Any) -> None:
  """Raises a ValueError unless all of them are finite numbers above 0.

  >>> require_positive(tau=0.2)
  """
  for name, value in values.items():
    require(name, value, lambda x: 0 < x < math.inf, 'give a finite number above 0')


def lookup(path: str, name: Any, registry: Mapping[str, Any]) -> tuple[str, Any]:
  """(name, registry[name]), or a ValueError with the nearest name.

  >>> lookup('loss', 'info_nce', {'info_nce': 1})
  ('info_nce', 1)
  """
  if name is None:
    raise ValueError(f'{path}.name is missing: give one of {", ".join(registry)}')
  if name not in registry:
    raise ValueError(f'{path}.name = {name!r} is unknown: {nearest(name, registry)}')
  return name, registry[name]


def check_arguments(
  path: str, name: str, function: Callable, arguments: Mapping[str, Any], skip: Collection[str] = ()
) -> None:
  """Refuses an argument that `function` does not take, and the lack of one that it needs.

  >>> check_arguments('temperature', 'cosine', cosine, dict(tau_min=0.1, tau_max=0.2))
  """
  parameters = {k: p for k, p in inspect.signature(function).parameters.items() if k not in skip}
  for key, value in arguments.items():
    if key not in parameters:
      raise ValueError(f'{path}.{key} = {value!r} is no argument of {name!r}: {nearest(key, parameters)}')
    if isinstance(parameters[key].default, bool):
      require_bool(f'{path}.{key}', value)
  for key, parameter in parameters.items():
    if parameter.default is inspect.Parameter.empty and key not in arguments:
      raise ValueError(f'{path}.{key} is missing: {name!r} needs {", ".join(parameters)}')


def require_bool(key: str, value: Any) -> None:
  """Refuses what is no bool, such as the text 'no', which would count as True.

  >>> require_bool('temperature.gradient', True)
  """
  if not isinstance(value, bool):
    raise ValueError(f'{key} = {value!r} is no bool: give True or False')


@contextlib.contextmanager
def prefix(path: str) -> Iterator[None]:
  """In `with prefix('temperature')`, the ValueError 'tau = ...' reads 'temperature.tau = ...'.

  >>> with prefix('temperature'):
  ...   require_positive(tau=0.2)
  """
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{path}.{error}') from None


def is_mapping(value: Any) -> bool:
  """Whether it is a dict, or like one: an ml_collections.ConfigDict is no `Mapping`.

  >>> is_mapping(dict(name='constant')), is_mapping(0.2)
  (True, False)
  """
  return hasattr(value, 'keys')


def _show(value: Any) -> str:
  return f'{float(value):g}' if isinstance(value, jax.Array | np.number) and np.ndim(value) == 0 else repr(value)


def _ordered(low: Any, high: Any, names: tuple[str, str] = ('tau_min', 'tau_max')) -> None:
  require_positive(**dict(zip(names, (low, high), strict=True)))
  if not isinstance(high, jax.core.Tracer):
    require(names[0], low, lambda x: x <= high, f'{names[1]} is {_show(high)}, so give {names[0]} <= {names[1]}')


def _between(start: Any, end: Any, fraction: jax.Array) -> jax.Array:
  start, end = jnp.asarray(start, fraction.dtype), jnp.asarray(end, fraction.dtype)
  return start + (end - start) * fraction


def _as_float(step: jax.typing.ArrayLike) -> jax.Array:
  return jnp.asarray(step, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _clip(x: jax.Array, low: float, high: float) -> jax.Array:
  return jnp.clip(x, low, high)


def _clip_bwd(low, high, x, g):
  outwards = ((x >= high) & (g < 0)) | ((x <= low) & (g > 0))  # descent moves x by -g
  return (jnp.where(outwards, 0, g),)


_clip.defvjp(lambda x, low, high: (_clip(x, low, high), x), _clip_bwd)
