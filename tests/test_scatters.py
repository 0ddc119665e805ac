"""With deterministic operations on a GPU, XLA scatters one index after another, unless it knows that all differ.

Such a scatter took nine tenths of a step of a small BERT. No training step may have one.
"""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import simclr
from configs import cifar10
from ssl_jax import config, models
from ssl_jax.models.bert import KEY_WORDS


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
  is_text = name != 'vit_tiny32'
  encoder = models.create(name, **(dict(vocabulary=100, positions=16) if is_text else {}))
  shape, dtype = ((4, 8 + KEY_WORDS), jnp.uint32) if is_text else ((4, 32, 32, 3), jnp.float32)
  inputs = jnp.ones(shape, dtype)
  variables = encoder.init(jax.random.key(0), inputs, train=False)
  assert not sequential(jax.grad(lambda v: encoder.apply(v, inputs, train=True).sum()), variables)
