"""False negative cancellation (FNC, Huynh et al. 2022) with a momentum encoder and a memory of keys."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import losses, pairs
from ssl_jax.arrays import normalize
from ssl_jax.methods.moco import check_queue, enqueue, new_queue
from ssl_jax.methods.momentum import Momentum
from ssl_jax.methods.protocol import Inputs, Outputs, mean, of_positives
from ssl_jax.registry import prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class FNC(Momentum):
  """Each view is contrasted with the keys of all views of this batch and of earlier ones.

  Keys come from the momentum encoder. The score of another image's key is its largest cosine similarity to the keys of
  the query image's own views (its support). The `top` keys by score, if above `threshold`, are false negatives: the
  loss `fnc` attracts them or leaves them out. Small crops are used as queries only.

  Attributes:
    queue: the number of keys from earlier batches, 0 for none: a multiple of views · batch_size, or a smaller multiple
      of batch_size. At each step, the keys of the first views enter the queue, as many as fit. The authors' memory of
      16 batches of keys is a queue of 6 batches, plus the 10 views of the current batch.
    top, threshold: determine which keys are false negatives.
  """

  accepts: ClassVar[Mapping[str, Callable]] = {'fnc': losses.fnc}

  queue: int = 0
  top: int = 10
  threshold: float = 0.7

  def __post_init__(self):
    super().__post_init__()
    if self.queue:
      check_queue(self.queue, self.plan.batch_size)
      if self.queue % (entering := self._queued * self.plan.batch_size):
        fix = f'give a multiple of views · batch_size = {entering}, or a smaller multiple of batch_size'
        raise ValueError(f'method.queue = {self.queue} does not hold whole batches of keys: {fix}')
    with prefix('method'):  # `false_negatives` checks its arguments
      one = jnp.zeros((1, 1))
      jax.eval_shape(lambda: losses.false_negatives(one, one > 0, top=self.top, threshold=self.threshold))

  @property
  def _queued(self) -> int:
    """The number of views whose keys enter the queue at each step."""
    return min(self.queue // self.plan.batch_size, self.plan.views)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    if self.queue:
      shape = (self.queue, self.width(params, batch_stats, images))
      extra = {**extra, **new_queue(jax.random.fold_in(key, 1), shape, self._queued * self.plan.batch_size)}
    return params, batch_stats, extra

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    slow, tau = self.follow(params, extra, inputs), self.tau(params, inputs)
    queue = enqueue(extra) if self.queue else {}
    keys = jnp.stack([normalize(key) for key in self.targets(slow, batch_stats, self.large(inputs))])  # [V, B, D]
    queries, stats = self.embed(params, batch_stats, inputs.views)
    others = pairs.gather(keys, self.axis_name, axis=1)  # [V, N, D]
    memory = jnp.concatenate([others.reshape(-1, others.shape[2]), *([queue['queue']] if self.queue else [])])
    where = self._where(keys.shape[1], others.shape[1])
    product = lambda x: jnp.matmul(x, memory.T, precision=jax.lax.Precision.HIGHEST)
    false = losses.false_negatives(
      jnp.max(jnp.stack([product(key) for key in keys]), axis=0), where, top=self.top, threshold=self.threshold
    )
    values, similar = [], []
    for own, query in enumerate(queries):
      query = normalize(query)
      pos = jnp.stack([jnp.sum(query * key, axis=1) for v, key in enumerate(keys) if v != own], axis=1)
      values.append(jnp.mean(self.contrast(pos, product(query), false, where, tau)))
      similar.append(jnp.ravel(pos))
    pos = jnp.concatenate(similar)
    metrics = of_positives(pos, tau)
    metrics['false_negatives'] = jnp.mean(jnp.sum(false, axis=1).astype(jnp.float32))
    extra = {**extra, 'momentum': slow, **queue}
    if self.queue:
      extra['keys'] = others[: self._queued].reshape(-1, others.shape[2])
    return mean(values), Outputs(stats, extra, metrics)

  def _where(self, batch: int, total: int) -> jax.Array:
    """Which keys belong to other images than the query.  -> bool [B, V·N + queue]"""
    apart = pairs.not_own(batch, total, self.axis_name, least=1)
    return jnp.concatenate([jnp.tile(apart, (1, self.plan.views)), jnp.ones((batch, self.queue), bool)], axis=1)
