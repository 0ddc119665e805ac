"""How views, parameters and extra state become a loss and the next extra state: one small protocol, one registry."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from ssl_jax import losses, models, temperature
from ssl_jax.config import nearest
from ssl_jax.methods.protocol import Inputs, Method, Network, Outputs
from ssl_jax.methods.simclr import SimCLR
from ssl_jax.models import heads

NO_TEMPERATURE = temperature.Schedule(init=dict, at=lambda params, step: None)
METHODS: dict[str, type[Method]] = {'simclr': SimCLR}


def create(config: Mapping, *, steps_per_epoch: int, total_steps: int, axis_name: str | None = None) -> Method:
  """The method of a config, from its sections method, model, projector, loss and temperature."""
  spec = dict(config['method'])
  name = spec.pop('name')
  if name not in METHODS:
    raise ValueError(f'method.name = {name!r} does not exist: {nearest(name, list(METHODS))}')
  own = [f.name for f in dataclasses.fields(METHODS[name]) if f.name not in Method.__dataclass_fields__]
  for key, value in spec.items():
    if key not in own:
      raise ValueError(
        f'method.{key} = {value!r} is no parameter of {name!r}: {nearest(key, own) if own else "drop it"}'
      )
  tau = None if config['temperature']['name'] == 'none' else config['temperature']
  losses.check(config['loss'], tau)
  dtype = jnp.dtype(config['dtype'])
  network = Network(
    encoder=models.create(dtype=dtype, axis_name=axis_name, **config['model']),
    projector=heads.create(dtype=dtype, axis_name=axis_name, **config['projector']),
  )
  return METHODS[name](
    network=network,
    contrast=losses.from_config(config['loss']),
    temperature=NO_TEMPERATURE
    if tau is None
    else temperature.from_config(tau, steps_per_epoch=steps_per_epoch, total_steps=total_steps),
    axis_name=axis_name,
    **spec,
  )


__all__ = ['METHODS', 'Inputs', 'Method', 'Network', 'Outputs', 'create']
