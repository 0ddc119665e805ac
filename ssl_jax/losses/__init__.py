"""Losses: functions of similarities (`contrastive`) and of embeddings (`redundancy`), and the way from a config to one.

>>> loss = from_config(dict(name='balanced', alpha=2.0, lam=4.0))
>>> loss.takes_temperature
False
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ssl_jax import temperature as temperatures
from ssl_jax.losses.contrastive import (
  align_uniform,
  balanced,
  cacr,
  decoupled,
  decoupled_weighted,
  generalized_nt_xent,
  hard,
  hard_negative,
  hard_simple,
  info_nce,
  macl,
  multi_positive,
  nt_xent,
  penalties,
  penalty_entropy,
  simple,
  triplet,
)
from ssl_jax.losses.distillation import byol, dino, dino_centre, simsiam, sinkhorn, swav
from ssl_jax.losses.redundancy import arb, barlow_twins, vicreg, w_mse, zero_cl

__all__ = [
  'CONTRASTIVE',
  'Loss',
  'align_uniform',
  'arb',
  'balanced',
  'barlow_twins',
  'byol',
  'cacr',
  'check',
  'decoupled',
  'decoupled_weighted',
  'dino',
  'dino_centre',
  'from_config',
  'generalized_nt_xent',
  'hard',
  'hard_negative',
  'hard_simple',
  'info_nce',
  'macl',
  'multi_positive',
  'nt_xent',
  'penalties',
  'penalty_entropy',
  'simple',
  'simsiam',
  'sinkhorn',
  'swav',
  'triplet',
  'vicreg',
  'w_mse',
  'zero_cl',
]

CONTRASTIVE = {
  f.__name__: f
  for f in (
    info_nce,
    multi_positive,
    decoupled,
    decoupled_weighted,
    simple,
    hard,
    hard_simple,
    balanced,
    generalized_nt_xent,
    macl,
    hard_negative,
    align_uniform,
    cacr,
    triplet,
  )
}

_WHY_NO_TEMPERATURE = {
  'simple': 'it is linear in the similarities (behaviour Eq. 3)',
  'hard_simple': 'it is linear in the similarities (behaviour Eq. 3)',
  'balanced': 'its alpha is 1 / tau',
  'generalized_nt_xent': 'its alpha is 1 / tau',
  'macl': 'it sets its own from tau0, alpha and threshold',
  'align_uniform': 'it has t in its place',
  'cacr': 'it has t_pos and t_neg in its place',
  'triplet': 'it has a margin in its place',
}
_GIVEN = ('pos', 'neg', 'temperature', 'where', 'axis_name')


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
  """A loss of similarities with its parameters: `loss(pos, neg, where, temperature, axis_name=...) -> [Q]`.

  Attributes:
    function: a function of `CONTRASTIVE`.
    parameters: its arguments by name, but for the similarities, the mask and the temperature.

  >>> print(Loss(simple, dict(weight=0.5))(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-0.95]
  """

  function: Callable[..., jax.Array]
  parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return self.function.__name__

  @property
  def takes_temperature(self) -> bool:
    return self._takes('temperature')

  def __call__(
    self,
    pos: jax.Array,
    neg: jax.Array,
    where: jax.Array | None = None,
    temperature: temperatures.Temperature | None = None,
    *,
    axis_name: str | None = None,
  ) -> jax.Array:
    if self.takes_temperature != (temperature is not None):
      needs = 'needs one' if self.takes_temperature else f'has none: {_WHY_NO_TEMPERATURE.get(self.name, "give none")}'
      raise ValueError(f'temperature = {temperature!r}, but the loss {self.name!r} {needs}')
    given = {'temperature': temperature, 'axis_name': axis_name}
    given = {key: value for key, value in given.items() if self._takes(key)}
    return self.function(pos, neg, where=where, **self.parameters, **given)

  def _takes(self, argument: str) -> bool:
    return argument in inspect.signature(self.function).parameters


def from_config(spec: Mapping[str, Any]) -> Loss:
  """The loss of similarities that a config names, with every argument checked.

  >>> print(from_config(dict(name='simple', weight=0.5))(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-0.95]
  """
  if not temperatures.is_mapping(spec):
    raise ValueError(f"loss = {spec!r} is no mapping: give dict(name='info_nce')")
  arguments = dict(spec)
  name, function = temperatures.lookup('loss', arguments.pop('name', None), CONTRASTIVE)
  temperatures.check_arguments('loss', name, function, arguments, skip=_GIVEN)
  loss = Loss(function, arguments)
  with temperatures.prefix('loss'):  # the loss checks its own arguments: it is enough to trace it
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda pos, neg: loss(pos, neg, temperature=1.0 if loss.takes_temperature else None), one, one)
  return loss


def check(loss: Mapping[str, Any], temperature: Mapping[str, Any] | float | None) -> None:
  """Refuses a loss or a temperature that `from_config` refuses, and two that do not go together, with the reason.

  >>> check(dict(name='info_nce'), dict(name='cosine', tau_min=0.07, tau_max=0.2))
  >>> check(dict(name='simple'), None)
  """
  built = from_config(loss)
  if temperature is not None:
    temperatures.from_config(temperature)
    if not built.takes_temperature:
      value = dict(temperature) if temperatures.is_mapping(temperature) else temperature
      reason = f', {why}' if (why := _WHY_NO_TEMPERATURE.get(built.name)) else ''
      raise ValueError(f'temperature = {value!r}: {built.name!r} takes none{reason}: set temperature.name to none')
  elif built.takes_temperature:
    raise ValueError(f'temperature = None: {built.name!r} needs one: set temperature.name=constant, say')
