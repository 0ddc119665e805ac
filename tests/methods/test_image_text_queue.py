"""The queue of image_text against a slow loop in float64: values, gradients and entries, on any number of devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn

from ssl_jax import losses, methods, temperature
from ssl_jax.methods import Network, Plan
from ssl_jax.methods.image_text import Towers
from ssl_jax.methods.protocol import Inputs
from ssl_jax.models import heads
from ssl_jax.models.bert import KEY_WORDS, SentenceEncoder
from tests.helpers import mapped

pytestmark = pytest.mark.slow  # it compiles

BATCH, QUEUE, STEPS, WORDS, D, TAU, BIAS = 4, 8, 4, 6, 3, 0.3, -2.0


class Colors(nn.Module):
  """A matrix applied to an image of one pixel."""

  @nn.compact
  def __call__(self, images, train: bool):
    return nn.Dense(5, use_bias=False, name='fc')(images.reshape(len(images), 3))


class Words(SentenceEncoder):
  """The sum of a vector per token."""

  @nn.compact
  def __call__(self, sentences, train: bool):
    return nn.Embed(WORDS, 5, name='words')(sentences[:, :-KEY_WORDS]).sum(axis=1)


def build(loss, axis_name=None, tau=TAU, **fields):
  head = lambda: heads.MLP(features=(D,), batch_norm='none', last_bias=False)
  return methods.METHODS['image_text'](
    network=Towers(Colors(), head(), None, text=Network(Words(), head())),
    contrast=losses.Loss(losses.CONTRASTIVE[loss], {'bias': BIAS} if loss == 'sigmoid' else {}),
    temperature=temperature.from_config(tau),
    plan=Plan(batch_size=BATCH, examples=99, views=1, steps_per_epoch=9, total_steps=STEPS),
    axis_name=axis_name,
    **{'queue': QUEUE, **fields},
  )


def batch_of(step):
  """Two views of images, and captions of three tokens, as float32 [B, 6 + 3]."""
  rng = np.random.default_rng(step)
  tokens = rng.integers(1, WORDS, (BATCH, 3))
  return np.concatenate([rng.normal(size=(BATCH, 6)), tokens], axis=1).astype(np.float32)


def step_of(method, views, carried, batch):
  """(loss, gradients, extra) of a step; `carried` is (params, extra)."""
  images = [batch[:, 3 * v : 3 * v + 3].reshape(-1, 1, 1, 3) for v in range(views)]
  sentences = jnp.pad(batch[:, 6:].astype(jnp.uint32), [(0, 0), (0, KEY_WORDS)])
  params, extra = carried
  inputs = Inputs((*images, sentences), jnp.arange(len(batch)), jnp.int32(0), jax.random.key(0))
  of = lambda params: method.loss(params, {}, extra, inputs)
  (value, outputs), gradients = jax.value_and_grad(of, has_aux=True)(params)
  if method.axis_name:
    value, gradients = jax.lax.pmean((value, gradients), method.axis_name)
  return value, gradients, outputs.extra


def slow_loss(loss, bias, pos, neg):
  """The loss of a query with some positives and negatives, as numbers of torch."""
  if loss == 'sigmoid':
    softplus = lambda x: torch.log1p(torch.exp(x))
    return sum(softplus(-(p / TAU + bias)) for p in pos) / len(pos) + sum(softplus(n / TAU + bias) for n in neg)
  total = sum(torch.exp(n / TAU) for n in neg)
  return sum(torch.log(torch.exp(p / TAU) + total) - p / TAU for p in pos) / len(pos)


def expected(loss, params, batch, views, queue):
  """(loss, gradients, the embeddings of images and captions) by loops over pairs, in float64."""
  given = jax.tree.map(lambda x: torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True), params)
  network, unit = given['network'], lambda x: x / x.norm()
  (head,), (text_head,) = ([leaf for leaf in jax.tree.leaves(part['projector'])] for part in (network, network['text']))
  colors, words = network['encoder']['fc']['kernel'], network['text']['encoder']['words']['embedding']
  pixels = torch.tensor(batch[:, :6], dtype=torch.float64)
  images = [[unit(pixels[i, 3 * v : 3 * v + 3] @ colors @ head) for i in range(BATCH)] for v in range(views)]
  texts = [unit(sum(words[int(token)] for token in batch[i, 6:]) @ text_head) for i in range(BATCH)]
  old_images, old_texts = (torch.tensor(part, dtype=torch.float64) for part in queue)
  bias = given.get('loss', {}).get('bias')
  value = 0.0
  for i in range(BATCH):
    others = [j for j in range(BATCH) if j != i]
    for v in range(views):
      neg = [images[v][i] @ texts[j] for j in others] + [images[v][i] @ old for old in old_texts]
      value = value + slow_loss(loss, bias, [images[v][i] @ texts[i]], neg) / (2 * views * BATCH)
    pos = [texts[i] @ images[v][i] for v in range(views)]
    neg = [texts[i] @ images[v][j] for j in others for v in range(views)] + [texts[i] @ old for old in old_images]
    value = value + slow_loss(loss, bias, pos, neg) / (2 * BATCH)
  value.backward()
  gradients = jax.tree.map(lambda x: np.zeros(x.shape) if x.grad is None else x.grad.numpy(), given)
  return value.item(), gradients, np.stack([torch.stack(x).detach().numpy() for x in (images[-1], texts)])


@pytest.mark.parametrize(
  ('loss', 'views', 'devices', 'how', 'block'),
  [
    ('info_nce', 1, 1, '', 0),
    ('sigmoid', 1, 1, '', 3),
    ('info_nce', 2, 4, 'pmap', 0),
    ('info_nce', 2, 2, 'shard_map', 1),
    ('sigmoid', 1, 4, 'shard_map', 0),
  ],
)
def test_values_gradients_and_the_queue_are_those_of_loops(loss, views, devices, how, block):
  method = build(loss, axis_name='batch' if devices > 1 else None, block=block)
  params, _, extra = build(loss).init(jax.random.key(0), jnp.zeros((2, 1, 1, 3)))
  of = functools.partial(step_of, method, views)
  run = jax.jit(of) if devices == 1 else mapped(of, devices, how)
  ring = np.asarray(extra['queue'], np.float64)
  assert ring.shape == (2, QUEUE, D)
  np.testing.assert_allclose(np.linalg.norm(ring, axis=-1), 1, rtol=1e-6)
  keys = ring[:, :BATCH]
  for step in range(STEPS):
    value, gradients, extra = run((params, extra), batch_of(step))
    if devices > 1:
      for name in extra:
        np.testing.assert_array_equal(extra[name], np.broadcast_to(extra[name][:1], extra[name].shape))
      value, gradients, extra = jax.tree.map(lambda x: x[-1], (value, gradients, extra))
    start = step * BATCH % QUEUE
    ring[:, start : start + BATCH] = keys  # of the step before
    right, right_gradients, keys = expected(loss, params, batch_of(step), views, ring)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    chex.assert_trees_all_close(gradients, right_gradients, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(extra['queue'], ring, atol=1e-6)
    np.testing.assert_allclose(extra['keys'], keys, atol=1e-6)


@pytest.mark.parametrize(('devices', 'how'), [(2, 'pmap'), (4, 'shard_map')])
def test_a_mean_over_all_queries_is_over_all_devices(devices, how):
  """The logarithm in `align_uniform` is that of a mean over the whole batch."""
  of = lambda axis_name: functools.partial(step_of, build('align_uniform', axis_name, tau=None), 2)
  params, _, extra = build('align_uniform', tau=None).init(jax.random.key(0), jnp.zeros((2, 1, 1, 3)))
  found = mapped(of('batch'), devices, how)((params, extra), batch_of(0))
  right = jax.jit(of(None))((params, extra), batch_of(0))
  chex.assert_trees_all_close(jax.tree.map(lambda x: x[-1], found), right, rtol=1e-4, atol=1e-6)
