"""SwAV (Caron et al. 2020): each view predicts the prototype assignments of the others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import losses, pairs
from ssl_jax.arrays import normalize
from ssl_jax.methods.distillation import directions
from ssl_jax.methods.moco import check_queue, enqueue, new_queue
from ssl_jax.methods.protocol import Inputs, Method, Outputs, frozen, mean, require_epochs
from ssl_jax.registry import is_whole, prefix, require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwAV(Method):
  """Each view predicts the codes of the other full-size views. Sinkhorn computes the codes over the batch.

  Attributes:
    epsilon, iterations: parameters of the Sinkhorn algorithm.
    queue: the number of earlier embeddings per view that Sinkhorn includes, once the queue is full and `queue_epochs`
      have passed; 0 for none. Use it if batches are small compared with the number of prototypes.
    freeze_epochs: the number of epochs at the start in which the prototypes are not trained.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'swav': losses.swav}
  of_similarity: ClassVar[bool] = False
  predictor: ClassVar[str] = 'prototypes'

  epsilon: float = 0.05
  iterations: int = 3
  queue: int = 0
  queue_epochs: int = 15
  freeze_epochs: int = 1

  def __post_init__(self):
    with prefix('method'):
      require_positive(epsilon=self.epsilon)
      require('iterations', self.iterations, lambda n: is_whole(n) and n >= 1, 'a whole number of at least 1')
      require_epochs(queue_epochs=self.queue_epochs, freeze_epochs=self.freeze_epochs)
    if self.queue:
      check_queue(self.queue, self.plan.batch_size)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    if self.queue:
      shape = (self.plan.views, self.queue, self.width(params, batch_stats, images))
      extra = {**extra, **new_queue(jax.random.fold_in(key, 1), shape, self.plan.batch_size)}
    return params, batch_stats, extra

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    tau, network = self.tau(params, inputs), params['network']
    extra = {**extra, **enqueue(extra)} if self.queue else extra
    prototypes = frozen(network['predictor'], self.freeze_epochs * self.plan.steps_per_epoch, inputs.step)
    outputs, batch_stats = self.encode({**network, 'predictor': prototypes}, batch_stats, inputs.views)
    large = range(len(self.large(inputs)))
    codes = [self._code(outputs[v]['predictor'], prototypes, extra, v, inputs.step) for v in large]
    both = directions(len(outputs), len(codes))
    values = [jnp.mean(self.contrast(outputs[v]['predictor'], codes[w], tau)) for v, w in both]
    if self.queue:
      new = jnp.stack([normalize(jax.lax.stop_gradient(outputs[v]['projector'])) for v in large])
      extra = {**extra, 'keys': pairs.gather(new, self.axis_name, axis=1)}
    return mean(values), Outputs(batch_stats, extra, {'temperature': jnp.asarray(tau, jnp.float32)})

  def _code(self, scores, prototypes, extra, view, step):
    settings: dict[str, Any] = dict(epsilon=self.epsilon, iterations=self.iterations, axis_name=self.axis_name)
    code = losses.sinkhorn(scores, **settings)
    if not self.queue:
      return code
    old: Any = self.network.apply({'params': {'predictor': prototypes}}, extra['queue'][view], False, method='predict')
    start = max(self.queue_epochs * self.plan.steps_per_epoch, self.queue // self.plan.batch_size)
    return jnp.where(step < start, code, losses.sinkhorn(scores, others=old, **settings))
