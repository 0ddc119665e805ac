"""How views, parameters and extra state become a loss and the next extra state: one small protocol, one registry."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ssl_jax import losses, models, temperature
from ssl_jax.methods.bank import MemoryBank
from ssl_jax.methods.distillation import BYOL, DINO, SimSiam
from ssl_jax.methods.isogclr import ISogCLR
from ssl_jax.methods.moco import MoCo, MoCoV3
from ssl_jax.methods.momentum import Momentum
from ssl_jax.methods.protocol import Inputs, Method, Network, Outputs, Plan
from ssl_jax.methods.redundancy import Redundancy
from ssl_jax.methods.simclr import CMC, SimCLR
from ssl_jax.methods.swav import SwAV
from ssl_jax.models import heads
from ssl_jax.registry import nearest

METHODS: dict[str, type[Method]] = {
  'simclr': SimCLR,
  'cmc': CMC,
  'moco': MoCo,
  'moco_v3': MoCoV3,
  'memory_bank': MemoryBank,
  'isogclr': ISogCLR,
  'redundancy': Redundancy,
  'byol': BYOL,
  'simsiam': SimSiam,
  'dino': DINO,
  'swav': SwAV,
}


def create(
  config: Mapping,
  *,
  steps_per_epoch: int,
  total_steps: int,
  examples: int | None = None,
  axis_name: str | None = None,
) -> Method:
  """The method of a config, from its sections method, model, projector, loss and temperature.

  `examples` is the number of training images, where it is known already.
  """
  spec = _plain(config['method'])
  name = spec.pop('name')
  if name not in METHODS:
    raise ValueError(f'method.name = {name!r} does not exist: {nearest(name, list(METHODS))}')
  kind = METHODS[name]
  own = [f.name for f in dataclasses.fields(kind) if f.name not in Method.__dataclass_fields__]
  own += ['predictor'] if kind.predictor else []
  for key, value in spec.items():
    if key not in own:
      raise ValueError(
        f'method.{key} = {value!r} is no parameter of {name!r}: {nearest(key, own) if own else "drop it"}'
      )
    if isinstance(getattr(kind, key, None), bool):
      temperature.require_bool(f'method.{key}', value)
  if config['views'] < kind.least_views:
    raise ValueError(f'views = {config["views"]} are too few for {name!r}: give {kind.least_views} or more')
  tau = None if config['temperature']['name'] == 'none' else config['temperature']
  contrast = _loss(name, kind, config['loss'], tau)
  common = dict(dtype=jnp.dtype(config['dtype']), axis_name=axis_name)
  predictor = {'name': kind.predictor, **spec.pop('predictor', {})} if kind.predictor else None
  with temperature.prefix('model'):
    encoder = models.create(**common, **config['model'])
  with temperature.prefix('projector'):
    projector = heads.create(**common, **config['projector'])
  with temperature.prefix('method.predictor'):
    predictor = predictor and heads.create(**common, **predictor)
  network = Network(encoder, projector, predictor)
  clock = dict(steps_per_epoch=steps_per_epoch, total_steps=total_steps)
  batch_size = config['batch_size']
  return kind(
    network=network,
    contrast=contrast,
    temperature=temperature.from_config(tau, **clock),
    plan=Plan(batch_size=batch_size, examples=examples or batch_size, views=config['views'], **clock),
    axis_name=axis_name,
    **spec,
  )


def _plain(section: Mapping) -> dict:
  """A section as dicts, which have a repr of one line."""
  return {key: _plain(value) if temperature.is_mapping(value) else value for key, value in section.items()}


def _loss(method: str, kind: type[Method], spec: Mapping, tau: Mapping | None) -> Callable[..., jax.Array]:
  """The loss that a config names, with its parameters; refuses one that the method or the temperature does not suit."""
  if spec['name'] not in kind.accepts:
    raise ValueError(
      f'loss.name = {spec["name"]!r} is no loss of the method {method!r}: {nearest(spec["name"], list(kind.accepts))}'
    )
  if kind.accepts is losses.CONTRASTIVE:
    losses.check(spec, tau)
    return losses.from_config(spec)
  arguments = dict(spec)
  name = arguments.pop('name')
  function = kind.accepts[name]
  parameters = inspect.signature(function).parameters
  given = [key for key, p in parameters.items() if p.default is p.empty] + ['axis_name']
  temperature.check_arguments('loss', name, function, arguments, skip=given)
  if ('temperature' in parameters) != (tau is not None):
    mend = 'name it, such as constant' if tau is None else 'set temperature.name to none'
    takes = 'takes one' if tau is None else 'takes none'
    raise ValueError(f'temperature.name = {"none" if tau is None else tau["name"]!r}: {name!r} {takes}: {mend}')
  return functools.partial(function, **arguments)


__all__ = ['METHODS', 'Inputs', 'Method', 'Momentum', 'Network', 'Outputs', 'Plan', 'create']
