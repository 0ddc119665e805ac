"""Methods by name. Each maps views, parameters and extra state to a loss and the next extra state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ssl_jax import losses, models, temperature
from ssl_jax.methods.bank import MemoryBank
from ssl_jax.methods.cancellation import FNC
from ssl_jax.methods.distillation import BYOL, DINO, SimSiam
from ssl_jax.methods.image_text import ImageText, Towers
from ssl_jax.methods.isogclr import ISogCLR
from ssl_jax.methods.moco import MoCo, MoCoV3
from ssl_jax.methods.momentum import Momentum
from ssl_jax.methods.protocol import Inputs, Method, Network, Outputs, Plan
from ssl_jax.methods.redundancy import EMPSSL, Redundancy
from ssl_jax.methods.simclr import CMC, SimCLR
from ssl_jax.methods.swav import SwAV
from ssl_jax.models import heads
from ssl_jax.registry import Found, arguments, build, find, is_whole, nearest, plain, require

METHODS: dict[str, type[Method]] = {
  'simclr': SimCLR,
  'cmc': CMC,
  'moco': MoCo,
  'moco_v3': MoCoV3,
  'memory_bank': MemoryBank,
  'fnc': FNC,
  'isogclr': ISogCLR,
  'redundancy': Redundancy,
  'emp_ssl': EMPSSL,
  'byol': BYOL,
  'simsiam': SimSiam,
  'dino': DINO,
  'swav': SwAV,
  'image_text': ImageText,
}

TEXT = dict(name='clip_text')  # the default caption encoder


class Parts(NamedTuple):
  """The parts of a method that do not depend on the training examples, built from the config alone."""

  method: Found
  network: Network
  contrast: Callable[..., Any]


def parts(config: Mapping[str, Any], axis_name: str | None = None) -> Parts:
  """Builds the networks and the loss of a config, from its sections method, model, projector and loss."""
  spec = plain(config['method'])
  kind = METHODS.get(spec.get('name', ''))
  # The parameters of the method's networks are not parameters of the method itself.
  predictor_spec: Any = None
  text_specs: dict[str, Any] = {}
  if kind and kind.predictor:
    predictor_spec = spec.pop('predictor', {})
  if kind and kind.text:
    text_specs = {key: spec.pop(key) for key in ('text', 'text_projector') if key in spec}
  found = find('method', spec, METHODS, given=Method.GIVEN)
  kind = METHODS[found.name]
  microbatches = found.parameters.get('microbatches', 1)
  require('method.microbatches', microbatches, lambda m: is_whole(m) and m >= 1, 'a whole number of at least 1')
  if config['views'] < kind.least_views:
    raise ValueError(f'views = {config["views"]} must be at least {kind.least_views} for {found.name!r}')
  contrast = _loss(found.name, kind, config['loss'], config['temperature'].get('name') != 'none')
  common = dict(dtype=jnp.dtype(config['dtype']), axis_name=axis_name)
  encoder = build('model', config['model'], models.ENCODERS, **common)
  projector = build('projector', config['projector'], heads.HEADS, **common)
  predictor = None
  if predictor_spec is not None:
    predictor = build('method.predictor', {'name': kind.predictor, **predictor_spec}, heads.HEADS, **common)
  if kind.text:
    text_encoder = build('method.text', text_specs.get('text', TEXT), models.ENCODERS, **common)
    if text_encoder.modality != 'sentences':
      name = text_specs['text']['name']
      raise ValueError(f'method.text.name = {name!r} encodes {text_encoder.modality}: give clip_text or bert_base')
    head = text_specs.get('text_projector', config['projector'])
    text = Network(text_encoder, build('method.text_projector', head, heads.HEADS, **common))
    return Parts(found, Towers(encoder, projector, predictor, text), contrast)
  return Parts(found, Network(encoder, projector, predictor), contrast)


def create(
  config: Mapping[str, Any],
  *,
  steps_per_epoch: int,
  total_steps: int,
  examples: int | None = None,
  axis_name: str | None = None,
  built: Parts | None = None,
) -> Method:
  """Builds the method of a config for a training run of known length.

  `examples` is the number of training examples, or None if it does not matter. `built` are the `parts` of the config,
  if they have been built already.
  """
  method, network, contrast = built or parts(config, axis_name)
  clock: dict[str, Any] = dict(steps_per_epoch=steps_per_epoch, total_steps=total_steps)
  batch_size = config['batch_size']
  schedule = temperature.from_config(config['temperature'], **clock, axis_name=axis_name)
  if schedule.of_similarity and not METHODS[method.name].of_similarity:
    raise ValueError(
      f'temperature.name = {config["temperature"]["name"]!r} is a function of the similarity, and the method '
      f'{method.name!r} needs a number or a schedule: set temperature.name=constant'
    )
  return method.entry(
    network=network,
    contrast=contrast,
    temperature=schedule,
    plan=Plan(batch_size=batch_size, examples=examples or batch_size, views=config['views'], **clock),
    axis_name=axis_name,
    **method.parameters,
  )


def _loss(method: str, kind: type[Method], spec: Mapping[str, Any], has_temperature: bool) -> Callable[..., jax.Array]:
  """The loss that a config names, with its parameters; `has_temperature` is whether the config has a temperature."""
  name: Any = spec.get('name')
  if name not in kind.accepts:
    raise ValueError(f'loss.name = {name!r} is not a loss of the method {method!r}: {nearest(name, kind.accepts)}')
  if kind.accepts is losses.CONTRASTIVE:
    loss = losses.from_config(spec)
    takes, reason = loss.takes_temperature, loss.properties.no_temperature
  else:
    taken = arguments(kind.accepts[name])
    given = [key for key, parameter in taken.items() if parameter.default is parameter.empty]
    found = find('loss', spec, kind.accepts, given=[*given, 'axis_name'])
    loss, takes, reason = functools.partial(found.entry, **found.parameters), 'temperature' in taken, ''
  if takes and not has_temperature:
    raise ValueError(
      f"temperature.name = 'none', but the loss {name!r} needs a temperature: set temperature.name=constant"
    )
  if has_temperature and not takes:
    because = f' ({reason})' if reason else ''
    raise ValueError(f'the loss {name!r} takes no temperature{because}: set temperature.name=none')
  return loss


__all__ = ['METHODS', 'Inputs', 'Method', 'Momentum', 'Network', 'Outputs', 'Parts', 'Plan', 'create', 'parts']
