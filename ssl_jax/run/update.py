"""The training step as a pure function on one device, and a scan over several steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ssl_jax.arrays import check_sharding
from ssl_jax.data.views import View
from ssl_jax.methods import Inputs, Method
from ssl_jax.run.online_probe import OnlineProbe
from ssl_jax.run.state import State, average_of

Images = Any  # images [b, H, W, C], or a tree of arrays [b, ...]; a tuple if the host has cropped the views


def example_keys(seed: int, step: jax.Array, slots: jax.Array) -> jax.Array:
  """One key per example, from (seed, step, slot in the global batch), independent of the device.  -> [b]"""
  at_step = jax.random.fold_in(jax.random.key(seed), step)
  return jax.vmap(lambda slot: jax.random.fold_in(at_step, slot))(slots)


def step_key(seed: int, step: jax.Array) -> jax.Array:
  """The key of a step, for random numbers shared by all devices. It differs from the keys of all examples."""
  at_step = jax.random.fold_in(jax.random.key(seed), step)
  return jax.random.fold_in(at_step, np.uint32(2**32 - 1))


def make_views(augments: list[View], keys: jax.Array, images: Images) -> tuple[jax.Array, ...]:
  """One view per augmentation, each [b, h, w, C] (captions: [b, T + 2]).

  `images` is [b, H, W, C], or a tree of arrays [b, ...]. If the host has cropped the views, it is a tuple of groups
  [b, V, h, w, C], one per view size; a group of captions has the shape [b, 1, T].
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
  learning_rate: optax.Schedule,
  augments: list[View],
  *,
  seed: int,
  ema: float = 0.0,
  online_probe: OnlineProbe | None = None,
  axis_name: str | None = None,
) -> Callable[[State, jax.Array, jax.Array], tuple[State, dict[str, jax.Array]]]:
  """The training step on one device: (state, images [b, ...], index [b]) -> (state, metrics).

  Each device differentiates its local mean loss, and the gradients are averaged over the devices. The result is the
  gradient of the global mean, even if the loss gathers negatives from all devices.

  Args:
    learning_rate: the schedule of `optimizer`, only for the metrics.
    ema: if positive, the decay of the exponential moving average in extra['average'], which evaluations use.
    online_probe: if given, it is trained on the features before this step, with its state in extra['probe'].
  """

  def update(state, images, index):
    check_sharding(index, axis_name)
    b = index.shape[0]
    first = lax.axis_index(axis_name) * b if axis_name else 0
    keys = example_keys(seed, state.step, first + jnp.arange(b))
    inputs = Inputs(make_views(augments, keys, images), index, state.step, step_key(seed, state.step))

    loss_fn = lambda params: method.loss(params, state.batch_stats, state.extra, inputs)
    (loss, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {'loss': loss, **outputs.metrics}
    if axis_name:
      grads, metrics = lax.pmean((grads, metrics), axis_name)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics['learning_rate'] = jnp.asarray(learning_rate(state.step), jnp.float32)
    metrics['grad_norm'] = optax.tree.norm(grads)
    params = optax.apply_updates(state.params, updates)
    extra = outputs.extra
    if ema:
      newest = average_of(params, outputs.batch_stats)
      average = jax.tree.map(lambda old, new: old + (1 - ema) * (new - old), state.extra['average'], newest)
      extra = {**extra, 'average': average}
    if online_probe:
      evaluated, stats = state.evaluated
      features = method.features(evaluated, stats, inputs.views[0])['backbone']
      probe, probe_metrics = online_probe.update(state.extra['probe'], features, index, axis_name)
      extra, metrics = {**extra, 'probe': probe}, metrics | probe_metrics
    return State(state.step + 1, params, outputs.batch_stats, extra, opt_state), metrics

  return update


def scan_update(update: Callable) -> Callable:
  """S training steps on a dataset that is on the device: (state, dataset, index [b, S]) -> (state, metrics [S]).

  If S is 1, the metrics have no step axis.
  """

  def many(state, dataset, index):
    take = lambda index: jax.tree.map(lambda x: jnp.take(x, index, axis=0), dataset)
    one = lambda state, index: update(state, take(index), index)
    if index.shape[1] == 1:  # no loop: on a CPU, XLA's convolutions are slow inside one
      return one(state, index[:, 0])
    return lax.scan(one, state, index.T)

  return many
