"""The pure update: one training step of one device, and several of them in one scan."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ssl_jax.methods import Inputs, Method
from ssl_jax.run.online_probe import Probe
from ssl_jax.run.state import State, average_of

Images = jax.Array | tuple[jax.Array, ...]
# One view of one example: (key, image) -> image.
Augment = Callable[[jax.Array, jax.Array], jax.Array]


def example_keys(seed: int, step: jax.Array, slots: jax.Array) -> jax.Array:
  """One key an example, from (seed, step, place in the global batch), so that no key depends on the device.  [b]"""
  at_step = jax.random.fold_in(jax.random.key(seed), step)
  return jax.vmap(lambda slot: jax.random.fold_in(at_step, slot))(slots)


def step_key(seed: int, step: jax.Array) -> jax.Array:
  """The key of a step, for what a method draws for all devices alike; no example has it."""
  at_step = jax.random.fold_in(jax.random.key(seed), step)
  return jax.random.fold_in(at_step, np.uint32(2**32 - 1))


def make_views(augments: list[Augment], keys: jax.Array, images: Images) -> tuple[jax.Array, ...]:
  """A view an augmentation, each [b, h, w, C].

  Images are [b, H, W, C] or, cropped on the host, groups of views of one size, each group [b, V, h, w, C].
  """
  if isinstance(images, tuple):
    images = [group[:, v] for group in images for v in range(group.shape[1])]
  else:
    images = [images] * len(augments)
  views = []
  for v, augment in enumerate(augments):
    view_keys = jax.vmap(lambda key, v=v: jax.random.fold_in(key, v))(keys)
    views.append(jax.vmap(augment)(view_keys, images[v]))
  return tuple(views)


def make_update(
  method: Method,
  optimizer: optax.GradientTransformation,
  rate: optax.Schedule,
  augments: list[Augment],
  *,
  seed: int,
  ema: float = 0.0,
  probe: Probe | None = None,
  axis_name: str | None = None,
) -> Callable[[State, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]:
  """(state, images [b, ...], index [b]) -> (state, metrics), over this device's part of the batch.

  The local mean loss is differentiated and the gradients are averaged over the devices, which gives the gradient of
  the global mean even where the loss gathers its negatives from all of them. With an `ema` above 0 the average of the
  network's weights and running statistics, which evaluations use, goes on in extra['average']; a `probe` learns in
  extra['probe'] from what evaluations would have seen before this step.
  """

  def update(state, images, index):
    b = index.shape[0]
    first = lax.axis_index(axis_name) * b if axis_name else 0
    keys = example_keys(seed, state.step, first + jnp.arange(b))
    inputs = Inputs(make_views(augments, keys, images), index, state.step, step_key(seed, state.step))

    def loss_fn(params):
      loss, outputs = method.loss(params, state.batch_stats, state.extra, inputs)
      return loss, outputs

    (loss, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {'loss': loss, **outputs.metrics}
    if axis_name:
      grads, metrics = lax.pmean((grads, metrics), axis_name)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics |= {'rate': jnp.asarray(rate(state.step), jnp.float32), 'gradient': optax.tree.norm(grads)}
    params = optax.apply_updates(state.params, updates)
    extra = outputs.extra
    if ema:
      newest = average_of(params, outputs.batch_stats)
      average = jax.tree.map(lambda old, new: old + (1 - ema) * (new - old), state.extra['average'], newest)
      extra = {**extra, 'average': average}
    if probe:
      features = method.features(*state.evaluated, inputs.views[0])['backbone']
      learned, watched = probe.update(state.extra['probe'], features, index, axis_name)
      extra, metrics = {**extra, 'probe': learned}, metrics | watched
    return State(state.step + 1, params, outputs.batch_stats, extra, opt_state), metrics

  return update


def scan_update(update: Callable) -> Callable:
  """Several updates on images that live on the device: (state, dataset, index [b, S]) -> (state, metrics of [S]).

  A single one has metrics without that axis.
  """

  def many(state, dataset, index):
    one = lambda state, index: update(state, jnp.take(dataset, index, axis=0), index)
    if index.shape[1] == 1:  # no loop: XLA's CPU convolutions are slow inside one
      return one(state, index[:, 0])
    return lax.scan(one, state, index.T)

  return many
