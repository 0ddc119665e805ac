"""A linear classifier that is trained alongside the encoder without affecting it (`config.online_probe`)."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ssl_jax.arrays import cross_entropy
from ssl_jax.run.optimizers import for_strict_promotion

Array = TypeVar('Array', np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class OnlineProbe:
  """Softmax regression on the features used by evaluations, with one Adam step per training step.

  It costs one forward pass of one view. `labels` [n] are the labels of all training images.
  """

  labels: np.ndarray
  learning_rate: float

  @property
  def optimizer(self) -> optax.GradientTransformation:
    return for_strict_promotion(optax.adam(self.learning_rate))

  def init(self, width: int) -> dict[str, Any]:
    """The initial state of the probe, for features [b, width]."""
    classes = int(self.labels.max()) + 1
    weights = {'kernel': jnp.zeros((width, classes)), 'bias': jnp.zeros(classes)}
    return {'weights': weights, 'optimizer': self.optimizer.init(weights)}

  def update(
    self, state: dict[str, Any], features: jax.Array, index: jax.Array, axis_name: str | None = None
  ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """One step on this device's features [b, width] of the training images `index` [b].  -> (next state, metrics)"""
    features, labels = lax.stop_gradient(features.astype(jnp.float32)), jnp.asarray(self.labels, jnp.int32)[index]

    def loss_fn(weights):
      logits = scores(weights, features)
      loss = cross_entropy(logits, labels).mean()
      return loss, 100.0 * jnp.mean(jnp.argmax(logits, axis=1) == labels)

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state['weights'])
    if axis_name:
      loss, accuracy, grads = lax.pmean((loss, accuracy, grads), axis_name)
    updates, optimizer = self.optimizer.update(grads, state['optimizer'], state['weights'])
    weights = optax.apply_updates(state['weights'], updates)
    metrics = {'online_probe_loss': loss, 'online_probe_train': accuracy}
    return {'weights': weights, 'optimizer': optimizer}, metrics


def scores(weights: dict[str, Array], features: Array) -> Array:
  """The logits of features.  [b, width] -> [b, classes]"""
  return features @ weights['kernel'] + weights['bias'][None, :]
