"""The interface between a method and the training update, and the network that methods share."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from ssl_jax import losses
from ssl_jax.models.encoder import Encoder
from ssl_jax.registry import is_whole, require
from ssl_jax.temperature import Schedule, Temperature


class Plan(NamedTuple):
  """Facts about the run that a method may need."""

  batch_size: int  # examples per step, over all devices
  examples: int  # training examples
  views: int  # full-size views
  steps_per_epoch: int
  total_steps: int


class Inputs(NamedTuple):
  """This device's part of the inputs of a step."""

  views: tuple[jax.Array, ...]  # views of the same examples, each [b, H, W, C], normalized; small crops come last
  index: jax.Array  # type: ignore[assignment]  # int32 [b], positions of the examples in the training set
  step: jax.Array  # int32 []
  key: jax.Array  # random key of this step, the same on every device


class Outputs(NamedTuple):
  """What a step returns besides its loss."""

  batch_stats: Any  # running statistics of batch norm
  extra: Any  # state outside the optimizer, such as a queue, a memory bank or a momentum encoder
  metrics: dict[str, jax.Array]  # scalars, averaged over the devices by the update


class Network(nn.Module):
  """An encoder, a projector and, if the method has one, a predictor or prototypes.

  Examples -> {'backbone': [b, D], 'projector': [b, P]}, and 'predictor': [b, R] if `predict` is True.
  """

  encoder: Encoder
  projector: nn.Module
  predictor: nn.Module | None = None

  def __call__(self, images: jax.Array, train: bool, predict: bool = False) -> dict[str, jax.Array]:
    backbone = self.encoder(images, train=train)
    outputs = {'backbone': backbone, 'projector': self.projector(backbone, train=train)}
    if predict and self.predictor is not None:
      outputs['predictor'] = self.predict(outputs['projector'], train)
    return outputs

  def predict(self, projections: jax.Array, train: bool) -> jax.Array:
    assert self.predictor is not None
    return self.predictor(projections, train=train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A training method, as pure functions of explicit state. A subclass overrides `loss`, and more as needed.

  The fields that a subclass adds are its parameters in the config section `method`. `microbatches` is a parameter of
  every method.

  Attributes:
    microbatches: if above 1, the network encodes each device's part of the batch in this many parts, one after the
      other, and recomputes them in the backward pass. This gives the exact gradient of the loss of the whole batch with
      the memory of one part (gradient caching, Gao et al. 2021). Batch norm is over each part, on all devices.
  """

  GIVEN: ClassVar[tuple[str, ...]] = ('network', 'contrast', 'temperature', 'plan', 'axis_name')  # not in configs

  accepts: ClassVar[Mapping[str, Callable]] = losses.CONTRASTIVE  # the losses that the config may name
  predictor: ClassVar[str | None] = None  # the head after the projector; `method.predictor` changes it
  least_views: ClassVar[int] = 2
  of_similarity: ClassVar[bool] = True  # whether the temperature may be a function of the similarity
  text: ClassVar[bool] = False  # whether there is a second network, for captions: `method.text` is its encoder

  network: Network
  contrast: Callable[..., jax.Array]
  temperature: Schedule
  plan: Plan
  axis_name: str | None = None
  microbatches: int = 1

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    """The initial (params, batch_stats, extra), for inputs with the shape of `images`."""
    variables = self.network.init(key, images, train=False, predict=True)
    params = {'network': variables['params'], 'temperature': self.temperature.init()}
    if isinstance(self.contrast, losses.Loss) and (learned := self.contrast.init()):
      params['loss'] = learned
    return params, variables.get('batch_stats', {}), {}

  def start_from(self, encoder: Mapping, params: Any, batch_stats: Any, extra: Any) -> tuple[Any, Any, Any]:
    """The results of `init`, with the weights of the encoder replaced by {'params': ..., 'batch_stats': ...}."""
    params = {**params, 'network': {**params['network'], 'encoder': encoder['params']}}
    if 'batch_stats' in encoder:
      batch_stats = {**batch_stats, 'encoder': encoder['batch_stats']}
    return params, batch_stats, extra

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    """The mean loss over this device's examples, and the other results of the step."""
    raise TypeError(f'{type(self).__name__} has no loss')

  def features(self, params: Any, batch_stats: Any, images: jax.Array) -> dict[str, jax.Array]:
    """{'backbone': [b, D], 'projector': [b, P]} of normalized inputs, with the running statistics of batch norm."""
    outputs: Any = self.network.apply({'params': params['network'], 'batch_stats': batch_stats}, images, train=False)
    return outputs

  def encode(
    self, network: Any, batch_stats: Any, views: Sequence[jax.Array], predict: bool = True, apart: bool = False
  ) -> tuple[list[dict[str, jax.Array]], Any]:
    """The network's outputs for each view, and the new running statistics.

    Views of the same size are encoded as one batch, or one after the other if `apart`.
    """
    outputs = []
    for _, group in itertools.groupby(enumerate(views), key=lambda view: (view[0] if apart else 0, view[1].shape)):
      group = [view for _, view in group]
      encoded, batch_stats = self._encode_group(network, batch_stats, group, predict)
      outputs += encoded
    return outputs, batch_stats

  def _encode_group(
    self, network: Any, batch_stats: Any, group: Sequence[jax.Array], predict: bool
  ) -> tuple[list[dict[str, jax.Array]], Any]:
    """`encode` for views of one size, as one batch or in microbatches."""

    def apply(views):
      variables = {'params': network, 'batch_stats': batch_stats}
      joined, changed = self.network.apply(
        variables, jnp.concatenate(views), train=True, predict=predict, mutable=['batch_stats']
      )
      parted = {name: jnp.split(x, len(views)) for name, x in joined.items()}
      outputs = [{name: parts[v] for name, parts in parted.items()} for v in range(len(views))]
      return outputs, changed.get('batch_stats', {})

    m = self.microbatches
    if m == 1:
      return apply(group)
    # Example i is in part i mod m, so that a part has the same examples for any number of devices.
    split = lambda x: jnp.swapaxes(x.reshape(-1, m, *x.shape[1:]), 0, 1)
    join = lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])
    outputs, stats = jax.lax.map(jax.checkpoint(apply, prevent_cse=False), jax.tree.map(split, group))
    # The update of the running statistics is linear in the batch statistics, so the mean over the parts is one update.
    return jax.tree.map(join, outputs), jax.tree.map(lambda x: jnp.mean(x, axis=0), stats)

  def embed(
    self, params: Any, batch_stats: Any, views: Sequence[jax.Array], apart: bool = False
  ) -> tuple[list[jax.Array], Any]:
    """The projections of all views, and the new running statistics."""
    outputs, batch_stats = self.encode(params['network'], batch_stats, views, apart=apart)
    return [output['projector'] for output in outputs], batch_stats

  def large(self, inputs: Inputs) -> tuple[jax.Array, ...]:
    """The views of full size, without the small crops of multi-crop."""
    return inputs.views[: self.plan.views]

  def width(self, params: Any, batch_stats: Any, images: jax.Array) -> int:
    """The width of the projections."""
    return jax.eval_shape(self.features, params, batch_stats, images)['projector'].shape[1]

  def tau(self, params: Any, inputs: Inputs) -> Temperature | None:
    """The temperature at this step."""
    return self.temperature.at(params['temperature'], inputs.step)


def mean(values: Sequence[jax.Array]) -> jax.Array:
  """The mean of arrays of one shape."""
  return sum(values[1:], values[0]) / len(values)


def write(table: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
  """The table with the rows of some examples replaced.  [N, ...], int [B], [B, ...] -> [N, ...]"""
  # An image that replaces a broken one may be in the batch twice. Only its first row is written.
  place = jnp.arange(len(index))
  again = jnp.argmax(index[:, None] == index[None], axis=1) != place
  return table.at[jnp.where(again, len(table) + place, index)].set(rows, mode='drop', unique_indices=True)


def require_epochs(**values: int) -> None:
  """Raises a ValueError unless each value is a whole number of epochs, at least 0."""
  for name, value in values.items():
    require(name, value, lambda n: is_whole(n) and n >= 0, 'a whole number of epochs')


def frozen(params: Any, until: jax.typing.ArrayLike, step: jax.Array) -> Any:
  """The parameters, with their gradient stopped at steps before `until`."""
  return jax.tree.map(lambda p: jnp.where(step < until, jax.lax.stop_gradient(p), p), params)


def of_positives(pos: jax.Array, tau: Temperature | None) -> dict[str, jax.Array]:
  """Metrics: the mean similarity of the positives and, if there is a temperature, its mean over the positives."""
  found = {'positive_similarity': jnp.mean(pos)}
  if tau is not None:
    found['temperature'] = jnp.mean(tau(pos) if callable(tau) else jnp.asarray(tau, jnp.float32))
  return found
