"""With deterministic operations on a GPU, XLA scatters one index after another, unless it knows that all differ.

Such a scatter took nine tenths of a step of a small BERT. No training step may have one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import simclr
from configs import cifar10
from ssl_jax import config, models
from ssl_jax.arrays import cross_entropy
from ssl_jax.run.online_probe import OnlineProbe


def sequential(function, *arguments):
  """The scatters of a function whose indices may repeat."""

  def equations(jaxpr):
    for equation in jaxpr.eqns:
      yield equation
      for value in jax.tree.leaves(equation.params):
        inner = getattr(value, 'jaxpr', value)
        if hasattr(inner, 'eqns'):
          yield from equations(inner)

  found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
  return [e for e in found if e.primitive.name.startswith('scatter') and not e.params['unique_indices']]


def test_a_repeated_index_is_found():
  index = jnp.array([0, 0, 1])
  inner = jax.jit(lambda x: jax.lax.cond(x[0] > 0, lambda x: x[index].sum(), lambda x: x.sum(), x))
  assert len(sequential(jax.grad(inner), jnp.ones(3))) == 1
  assert not sequential(jax.grad(lambda x: x.at[index].get(unique_indices=True).sum()), jnp.ones(3))


@pytest.mark.parametrize('variant', ['', *cifar10.VARIANTS])
def test_no_method_scatters_in_sequence(variant):
  chosen = cifar10.get_config(variant)
  if chosen.model.name.startswith('resnet'):
    config.override(chosen, 'model.stage_sizes', (1, 1, 1, 1))  # faster to trace
  _, init, update = simclr.parts(chosen)
  images = jax.ShapeDtypeStruct((128, 32, 32, 3), jnp.uint8)
  assert not sequential(update(0), jax.eval_shape(init, 0), images, jax.ShapeDtypeStruct((128,), jnp.int32))


@pytest.mark.parametrize('name', ['bert_tiny', 'clip_text_tiny', 'vit_tiny32'])
def test_no_transformer_scatters_in_sequence(name):
  encoder = models.create(name)
  inputs = encoder.example(32)
  variables = jax.eval_shape(lambda: encoder.init(jax.random.key(0), inputs, train=False))
  assert not sequential(jax.grad(lambda v: encoder.apply(v, inputs, train=True).sum()), variables)


def test_no_classifier_scatters_in_sequence():
  probe, features = OnlineProbe(np.arange(8) % 3, learning_rate=0.1), jnp.ones((4, 5))
  assert not sequential(probe.update, probe.init(5), features, jnp.arange(4))
  logits, labels = jax.random.normal(jax.random.key(0), (4, 3)), jnp.array([0, 2, 2, 1])
  ours, theirs = (
    lambda x, function=function: function(x, labels).sum()
    for function in (cross_entropy, optax.softmax_cross_entropy_with_integer_labels)
  )
  assert not sequential(jax.grad(ours), logits) and sequential(jax.grad(theirs), logits)
  np.testing.assert_allclose(ours(logits), theirs(logits), rtol=1e-6)
  np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(theirs)(logits), rtol=1e-5, atol=1e-7)
