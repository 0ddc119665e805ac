"""MoCo v2 (Chen et al. 2020) and v3 (Chen et al. 2021) with any contrastive loss and any temperature.

The authors shuffle batches across devices, so that a query cannot recognize its key by the batch statistics of their
device. Here batch norm is over the global batch, so no shuffling is needed.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.arrays import normalize
from ssl_jax.losses import Loss
from ssl_jax.methods.momentum import Momentum
from ssl_jax.methods.protocol import Inputs, Outputs, mean, of_positives
from ssl_jax.registry import prefix, require


def new_queue(key: jax.Array, shape: tuple[int, ...], batch_size: int) -> dict[str, jax.Array]:
  """A queue of random unit vectors [..., M, D], where to write the next keys, and the keys to write, [..., B, D]."""
  queue = normalize(jax.random.normal(key, shape))
  return {'queue': queue, 'pointer': jnp.zeros((), jnp.int32), 'keys': queue[..., :batch_size, :]}


def enqueue(extra: dict) -> dict[str, jax.Array]:
  """The queue with its oldest keys replaced by those of the previous step.

  Keys enter at the start of the next step. At the end of their own step, the backward pass still reads the queue, so
  XLA would copy it.
  """
  queue, pointer, keys = extra['queue'], extra['pointer'], extra['keys']
  queue = jax.lax.dynamic_update_slice_in_dim(queue, keys, pointer, axis=queue.ndim - 2)
  return {'queue': queue, 'pointer': (pointer + keys.shape[-2]) % queue.shape[-2]}


def check_queue(size: int, batch_size: int) -> None:
  require('method.queue', size, lambda n: 1 <= n <= 2**31, 'a number of keys, from 1 to 2^31')
  if size < batch_size or size % batch_size:
    near = max(size // batch_size, 1) * batch_size
    raise ValueError(f'method.queue = {size} must be a multiple of batch_size = {batch_size}: try {near}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoCo(Momentum):
  """Keys come from a momentum encoder; the negatives are the `queue` most recent keys.

  The first view is the query, and the K others are its positives. Small crops are additional queries. The keys of the
  last full-size view enter the queue. For CACR's Alg. 3, set symmetric=True and intra_batch=True, and use the loss
  `cacr` with stop_positive_weights=True.

  Attributes:
    queue: the number of keys in the queue.
    symmetric: use every view, not only the first, as the query.
    intra_batch: add the queries of the other images in the same view to the negatives.
    block: as in SimCLR.
  """

  contrast: Loss
  queue: int = 65536
  symmetric: bool = False
  intra_batch: bool = False
  block: int = 0

  def __post_init__(self):
    super().__post_init__()
    check_queue(self.queue, self.plan.batch_size)
    with prefix('method'):
      pairs.check_block(self.block)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    shape = (self.queue, self.width(params, batch_stats, images))
    return params, batch_stats, {**extra, **new_queue(jax.random.fold_in(key, 1), shape, self.plan.batch_size)}

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    slow, queue = self.follow(params, extra, inputs), enqueue(extra)
    large, tau = len(self.large(inputs)), self.tau(params, inputs)
    first = 0 if self.symmetric else 1  # the first view that is a key
    keys = [normalize(key) for key in self.targets(slow, batch_stats, inputs.views[first:large])]
    queries = inputs.views if self.symmetric else (inputs.views[0], *inputs.views[large:])
    queries, stats = self.embed(params, batch_stats, queries)
    found = []
    for own, query in enumerate(queries):
      # Keys are already unit vectors; normalizing the queue again would copy it.
      found.append(
        pairs.with_queue(
          normalize(query),
          jnp.stack([key for v, key in enumerate(keys) if v != own or not self.symmetric], axis=1),
          queue['queue'],
          in_batch=self.intra_batch,
          axis_name=self.axis_name,
          similarity='dot',
          block=self.block,
        )
      )
    contrast = self.contrast.at(params)
    values = [jnp.mean(contrast(pos, neg, tau, where=where, axis_name=self.axis_name)) for pos, neg, where in found]
    extra = {**extra, 'momentum': slow, **queue, 'keys': pairs.gather(keys[-1], self.axis_name)}
    pos = jnp.concatenate([jnp.ravel(pair.pos) for pair in found])
    metrics = of_positives(pos, self.contrast.temperature(tau, pos))
    return mean(values), Outputs(stats, extra, metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoCoV3(Momentum):
  """Contrasts the predicted query of each view with the keys of the other views of all images in the batch.

  With queries q_v,i and keys k_w,i of the views v, w of image i, and ℓ(pos, neg) the loss of a query:

    L = mean over v ≠ w and i of ℓ({q_v,i · k_w,i}, {q_v,i · k_w,j : j ≠ i}).

  The paper's loss is the sum over v ≠ w times 2 tau. AdamW is invariant to this factor, and so is LARS for weights.
  With `keys_together`, each query has all of its K positives at once, as losses that weight positives (`cacr`) need:

    L = mean over v and i of ℓ({q_v,i · k_w,i : w ≠ v}, {q_v,i · k_w,j : w ≠ v, j ≠ i}).

  With two views, both are the same. Small crops are used as queries only.

  Attributes:
    keys_together: contrast a query with the keys of all other views at once.
  """

  predictor: ClassVar[str] = 'moco_v3'

  contrast: Loss
  momentum: float = 0.99
  final_momentum: float | None = 1.0
  keys_together: bool = False

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    slow, tau = self.follow(params, extra, inputs), self.tau(params, inputs)
    keys = self.targets(slow, batch_stats, self.large(inputs))
    outputs, stats = self.encode(params['network'], batch_stats, inputs.views)
    found: dict[int, list[pairs.Pairs]] = {}  # by the number of positives: a small crop has one more than a large view
    for v, output in enumerate(outputs):
      others = [key for w, key in enumerate(keys) if w != v]
      if self.keys_together:
        others = [jnp.stack(others, axis=1)]
      for key in others:
        pair = pairs.with_keys(output['predictor'], key, axis_name=self.axis_name)
        found.setdefault(pair.pos.shape[1], []).append(pair)
    joined = [[jnp.concatenate(parts) for parts in zip(*group, strict=True)] for group in found.values()]
    contrast = self.contrast.at(params)
    values = [contrast(pos, neg, tau, where=where, axis_name=self.axis_name) for pos, neg, where in joined]
    pos = jnp.concatenate([pair[0].ravel() for pair in joined])
    metrics = of_positives(pos, self.contrast.temperature(tau, pos))
    return jnp.mean(jnp.concatenate(values)), Outputs(stats, {**extra, 'momentum': slow}, metrics)
