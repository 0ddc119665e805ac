"""False negative cancellation against float64 loops and a transcription of the authors' loss with memory in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ssl_jax import losses
from ssl_jax.methods import Inputs
from tests.methods import test_state
from tests.methods.test_state import BATCH, TAU, D, batches, build, matrices
from tests.reference import contrastive as reference
from tests.test_losses import difference_quotient, rows, similarities

VIEWS, TOP, THRESHOLD = 3, 5, 0.97


@pytest.mark.parametrize('attract', [True, False])
@pytest.mark.parametrize('positives', [1, 4])
def test_value_and_gradient_are_those_of_the_loop(attract, positives):
  pos, neg, where = similarities(7, positives, queries=5)
  scores = np.random.default_rng(1).uniform(-1, 1, neg.shape).astype(np.float32)
  false = losses.false_negatives(scores, where, top=3, threshold=0.2)
  kept = [row[keep].tolist() for row, keep in zip(scores, where, strict=True)]
  expected = reference.false_negatives(kept, 3, 0.2)
  np.testing.assert_array_equal(np.concatenate(expected), np.asarray(false)[where])
  assert not np.asarray(false)[~where].any() and 0 < np.asarray(false).sum() < 3 * len(pos)
  found = lambda pos, neg, tau: losses.fnc(pos, neg, false, where, tau, attract=attract)
  both = jax.jit(lambda *x: (found(*x), jax.grad(lambda *x: found(*x).mean(), argnums=(0, 1))(*x)))
  for tau in (0.05, 0.2, 1.0):
    loop = lambda pos, neg, tau=tau: reference.fnc(pos, neg, expected, tau, attract)
    values, gradients = both(pos, neg, tau)
    np.testing.assert_allclose(values, loop(*rows(pos, neg, where)), rtol=1e-5, atol=2e-6)
    gradient = np.concatenate(gradients, axis=1)
    differentiable = np.concatenate([np.ones(pos.shape, bool), where], axis=1)
    np.testing.assert_array_equal(gradient[~differentiable], 0)
    entries = [tuple(entry) for entry in np.argwhere(differentiable)]
    wanted = difference_quotient(loop, pos, neg, where, entries)
    np.testing.assert_allclose([gradient[e] for e in entries], wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_bad_settings_are_refused():
  with pytest.raises(ValueError, match=r'^method.top = 0 must be a whole number of at least 1'):
    build('fnc', loss='fnc', top=0)
  with pytest.raises(ValueError, match=r'^method.threshold = 2 must be a cosine, in \[-1, 1\]'):
    build('fnc', loss='fnc', threshold=2)
  with pytest.raises(ValueError, match=r'^method.queue = 32 does not hold .*: give a multiple of .* = 24'):
    build('fnc', loss='fnc', views=3, queue=32)


def authors(queries, memory, keys):
  """Huynh et al. 2022: the loss with memory of their code. queries and keys: V of [B, D]; memory [M, D], keys first."""
  large = 1e9
  mask = torch.eye(BATCH, dtype=torch.float64)
  rest = len(memory) - VIEWS * BATCH
  own = torch.cat([mask.repeat(1, VIEWS), torch.zeros(BATCH, rest)], dim=1)
  scores = torch.einsum('vbd,md->vbm', torch.stack(keys), memory).max(dim=0).values - own * large
  nearest = torch.zeros_like(scores).scatter(1, scores.topk(TOP, dim=1).indices, 1.0)
  false = nearest * (scores > THRESHOLD)
  total = 0.0
  for anchor, query in enumerate(queries):
    itself = torch.zeros(BATCH, len(memory), dtype=torch.float64)
    itself[:, anchor * BATCH : (anchor + 1) * BATCH] = mask
    logits = query @ memory.T / TAU
    numerator = (logits * own * (1 - itself)).sum(1)
    denominator = logits - itself * large
    numerator = numerator + (denominator * false).sum(1)
    numerator = -numerator / (VIEWS - 1 + false.sum(1))
    total = total + (numerator + torch.logsumexp(denominator, dim=1)).mean()
  return total * 2 / VIEWS, float(false.sum(1).mean())


def test_the_loss_is_that_of_the_authors_code():
  """After a few steps, so that the momentum encoder and the memory differ from the encoder and the batch."""
  settings = dict(loss='fnc', views=VIEWS, queue=2 * BATCH, momentum=0.7, top=TOP, threshold=THRESHOLD)
  states, values = test_state.trace('fnc', 1, **settings)
  step = 5
  views, index = list(batches(VIEWS))[step]
  method = build('fnc', axis_name=None, **settings)
  state = jax.tree.map(jnp.asarray, states[step])
  inputs = Inputs(tuple(map(jnp.asarray, views)), jnp.asarray(index), jnp.int32(step), jax.random.key(0))

  def loss(network):
    value, outputs = method.loss({**state.params, 'network': network}, state.batch_stats, state.extra, inputs)
    return value, outputs

  (value, outputs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state.params['network'])
  assert float(value) == pytest.approx(values[step], rel=1e-5)

  fast, slow = matrices(states[step].params['network']), matrices(states[step + 1].extra['momentum'])
  encoder, projector = (torch.tensor(x, requires_grad=True) for x in fast)
  unit = lambda x: torch.nn.functional.normalize(x, dim=1)
  means = [torch.tensor(np.float64(view).mean(axis=(1, 2))) for view in views]
  keys = [unit(mean @ torch.tensor(slow[0]) @ torch.tensor(slow[1])) for mean in means]
  older = torch.tensor(np.float64(states[step].extra['keys']))  # of the step before: its first two views
  assert older.shape == (2 * BATCH, D)
  memory = torch.cat([*keys, older])
  expected, found = authors([unit(mean @ encoder @ projector) for mean in means], memory, keys)
  expected.backward()
  assert 0.5 < found < TOP, 'top and threshold both decide'
  assert float(outputs.metrics['false_negatives']) == pytest.approx(found)
  assert float(value) == pytest.approx(expected.item() / 2, rel=1e-5)
  for name, layer, tensor in (('encoder', 'fc', encoder), ('projector', 'fc1', projector)):
    theirs = tensor.grad.numpy() / 2
    np.testing.assert_allclose(gradient[name][layer]['kernel'], theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
