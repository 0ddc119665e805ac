"""What the update asks of a method, and the network that methods share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from ssl_jax import losses, temperature


class Inputs(NamedTuple):
  """One device's part of a step."""

  views: tuple[jax.Array, ...]  # V views of the same examples, each [b, H, W, C], augmented and normalised
  index: jax.Array  # int32 [b], where the examples stand in the training set
  step: jax.Array  # int32 []


class Outputs(NamedTuple):
  """What a step leaves behind, beside its loss."""

  batch_stats: Any
  extra: Any
  metrics: dict[str, jax.Array]  # scalars, averaged over the devices by the update


class Network(nn.Module):
  """An encoder with a projector on it: images -> {'backbone': [b, D], 'projector': [b, P]}."""

  encoder: nn.Module
  projector: nn.Module

  def __call__(self, images, train: bool):
    backbone = self.encoder(images, train=train)
    return {'backbone': backbone, 'projector': self.projector(backbone, train=train)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """Pure functions of explicit state. A method overrides `loss`, and the rest where it needs more.

  The fields that a subclass adds are its parameters in the config's `method` section.
  """

  network: Network
  contrast: losses.Loss
  temperature: temperature.Schedule
  axis_name: str | None = None

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    """(params, batch_stats, extra) from a few example images."""
    variables = self.network.init(key, images, train=False)
    params = {'network': variables['params'], 'temperature': self.temperature.init()}
    return params, variables.get('batch_stats', {}), {}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    """The mean loss of this device's examples, and what the step leaves behind."""
    raise TypeError(f'{type(self).__name__} has no loss')

  def features(self, params: Any, batch_stats: Any, images: jax.Array) -> dict[str, jax.Array]:
    """{'backbone': [b, D], 'projector': [b, P]} of normalised images, with running statistics."""
    return self.network.apply({'params': params['network'], 'batch_stats': batch_stats}, images, train=False)

  def embed(self, params: Any, batch_stats: Any, views: tuple[jax.Array, ...]) -> tuple[list[jax.Array], Any]:
    """The projections of all views, encoded as one batch and parted again, and the new running statistics."""
    variables = {'params': params['network'], 'batch_stats': batch_stats}
    outputs, changed = self.network.apply(variables, jnp.concatenate(views), train=True, mutable=['batch_stats'])
    return jnp.split(outputs['projector'], len(views)), changed.get('batch_stats', {})


def mean_temperature(tau: temperature.Temperature | None, pos: jax.Array) -> dict[str, jax.Array]:
  """{'tau': the mean temperature of the positives}, to watch; {} for a loss without one."""
  if tau is None:
    return {}
  return {'tau': jnp.mean(tau(pos) if callable(tau) else jnp.asarray(tau, jnp.float32))}
