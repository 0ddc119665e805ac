"""Methods that predict the target of one view from another view, without negatives: BYOL, SimSiam, DINO."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import losses, temperature
from ssl_jax.methods.momentum import Momentum
from ssl_jax.methods.protocol import Inputs, Method, Outputs, frozen, mean, require_epochs
from ssl_jax.registry import prefix, require, require_momentum


def directions(views: int, targets: int) -> list[tuple[int, int]]:
  """All pairs (view, target) in which the target is from another view."""
  return [(v, w) for v, w in itertools.product(range(views), range(targets)) if v != w]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimSiam(Method):
  """The prediction of each view matches the stop-gradient projection of every other view (Chen & He 2021).

  Attributes:
    mean_target: with more than two views, use the mean of the projections of all other views as the only target of a
      view, instead of one target per other view (FastSiam, Pototzky et al. 2022).
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'simsiam': losses.simsiam}
  predictor: ClassVar[str] = 'simsiam_predictor'

  mean_target: bool = False

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    outputs, batch_stats = self.encode(params['network'], batch_stats, inputs.views)
    targets = [output['projector'] for output in outputs[: len(self.large(inputs))]]
    return self._meet(outputs, targets), Outputs(batch_stats, extra, {})

  def _meet(self, outputs, targets) -> jax.Array:
    """The mean loss between the prediction of each view and its targets from the other views."""
    pairs = directions(len(outputs), len(targets))
    if self.mean_target:
      aims = [(v, mean([targets[w] for u, w in pairs if u == v])) for v in range(len(outputs))]
    else:
      aims = [(v, targets[w]) for v, w in pairs]
    return mean([jnp.mean(self.contrast(outputs[v]['predictor'], aim)) for v, aim in aims])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BYOL(Momentum, SimSiam):
  """SimSiam with targets from a momentum encoder (Grill et al. 2020).

  The loss is the mean over both directions, which is half of the paper's sum.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'byol': losses.byol}
  predictor: ClassVar[str] = 'byol'

  momentum: float = 0.996
  final_momentum: float | None = 1.0

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    slow = self.follow(params, extra, inputs)
    outputs, stats = self.encode(params['network'], batch_stats, inputs.views)
    targets = self.targets(slow, batch_stats, self.large(inputs))
    return self._meet(outputs, targets), Outputs(stats, {**extra, 'momentum': slow}, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DINO(Momentum):
  """The student predicts the teacher's prototype assignment of every other view (Caron et al. 2021).

  The teacher is the momentum encoder and sees no small crops. Its logits are centered by extra['centre'], a moving
  average over batches. The student uses the config's temperature. Evaluations use the student, whereas the authors
  evaluate the teacher; to evaluate a moving average of the student, set `ema` in the config.

  Attributes:
    teacher_temperature: a number or a schedule, such as
      dict(name='linear_schedule', start=0.04, end=0.07, epochs=30).
    centre_momentum: the weight of the old center in its moving average.
    freeze_epochs: the number of epochs at the start in which the prototypes are not trained.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'dino': losses.dino}
  of_similarity: ClassVar[bool] = False

  momentum: float = 0.996
  final_momentum: float | None = 1.0
  teacher_temperature: float | Mapping[str, Any] = 0.04
  centre_momentum: float = 0.9
  freeze_epochs: int = 1

  def __post_init__(self):
    super().__post_init__()
    with prefix('method'):
      require_momentum(centre_momentum=self.centre_momentum)
      require_epochs(freeze_epochs=self.freeze_epochs)
    schedule = self._teacher_schedule()
    tau = None if schedule.init() else schedule.at({}, 0)
    require(
      'method.teacher_temperature',
      self.teacher_temperature,
      lambda _: tau is not None and not callable(tau),
      'a number or a schedule, because no gradient reaches the teacher',
    )

  def _teacher_schedule(self):
    clock: dict[str, Any] = dict(steps_per_epoch=self.plan.steps_per_epoch, total_steps=self.plan.total_steps)
    return temperature.from_config(self.teacher_temperature, **clock, section='method.teacher_temperature')

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    return params, batch_stats, {**extra, 'centre': jnp.zeros(self.width(params, batch_stats, images))}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    slow, tau = self.follow(params, extra, inputs), self.tau(params, inputs)
    teacher = self.targets(slow, batch_stats, self.large(inputs))
    network = params['network']
    if 'prototypes' in network['projector']:
      last = frozen(network['projector']['prototypes'], self.freeze_epochs * self.plan.steps_per_epoch, inputs.step)
      network = {**network, 'projector': {**network['projector'], 'prototypes': last}}
    outputs, stats = self.encode(network, batch_stats, inputs.views)
    sharp = self._teacher_schedule().at({}, inputs.step)
    pairs = directions(len(outputs), len(teacher))
    values = [
      jnp.mean(self.contrast(outputs[v]['projector'], teacher[w], extra['centre'], tau, sharp)) for v, w in pairs
    ]
    centre = losses.dino_centre(
      extra['centre'], jnp.concatenate(teacher), momentum=self.centre_momentum, axis_name=self.axis_name
    )
    metrics = {'temperature': jnp.asarray(tau, jnp.float32), 'teacher_temperature': jnp.asarray(sharp, jnp.float32)}
    return mean(values), Outputs(stats, {**extra, 'momentum': slow, 'centre': centre}, metrics)
