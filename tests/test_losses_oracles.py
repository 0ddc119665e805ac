"""Independent implementations: optax, and the pseudo-code and formulas of the papers in torch, in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from absl.testing import absltest, parameterized

from ssl_jax import losses, pairs, temperature

B, D = 5, 4


def embeddings(count, batch=B, seed=0):
  return list(np.random.default_rng(seed).normal(size=(count, batch, D)).astype(np.float32))


def torch_of(arrays):
  return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]


def unit(x):
  return torch.nn.functional.normalize(x, dim=-1)


class OracleTest(chex.TestCase):
  def assert_same(self, actual, arrays, expected):
    """Compares value and gradients of `actual(*arrays)` with those of the torch scalar `expected(*arrays)`."""
    tensors = torch_of(arrays)
    oracle = expected(*tensors)
    oracle.backward()
    value, gradients = jax.jit(jax.value_and_grad(actual, argnums=tuple(range(len(arrays)))))(*arrays)
    np.testing.assert_allclose(value, oracle.item(), rtol=1e-5)
    for gradient, tensor in zip(gradients, tensors, strict=True):
      scale = max(float(tensor.grad.abs().max()), 1e-6) if tensor.grad is not None else 1.0
      expected_gradient = np.zeros(gradient.shape) if tensor.grad is None else tensor.grad.numpy()
      np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-4 * scale)

  def test_optax_ntxent(self):
    """optax averages over the queries, and takes the instance of each row as its label."""
    z = jnp.concatenate(embeddings(2))
    labels = jnp.tile(jnp.arange(B), 2)
    actual = jax.jit(jax.value_and_grad(lambda z, tau: losses.nt_xent(z[:B], z[B:], tau).mean()))
    expected = jax.jit(jax.value_and_grad(lambda z, tau: optax.losses.ntxent(z, labels, tau)))
    for tau in (0.05, 0.5):
      with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
        oracle = expected(z, tau)
      chex.assert_trees_all_close(actual(z, tau), oracle, rtol=1e-4, atol=1e-5)

  def test_dystress_algorithm_3(self):
    t_min, t_max = 0.07, 0.2

    def algorithm_3(z_1, z_2):
      z_1, z_2 = unit(z_1), unit(z_2)
      off_diagonal = ~torch.eye(B, dtype=torch.bool)
      s_11, s_22 = ((z @ z.T)[off_diagonal].view(B, -1) for z in (z_1, z_2))
      s = torch.cat([torch.cat([z_1 @ z_2.T, s_11], dim=1), torch.cat([z_2 @ z_1.T, s_22], dim=1)])
      tau = t_min + 0.5 * (t_max - t_min) * (1 + torch.cos(torch.pi * (1 + s.detach())))
      return torch.nn.functional.cross_entropy(s / tau, torch.arange(B).repeat(2))

    actual = lambda z1, z2: losses.nt_xent(z1, z2, temperature.cosine(t_min, t_max)).mean()
    self.assert_same(actual, embeddings(2), algorithm_3)

  @parameterized.product(intra_batch=(False, True), views=(2, 4))
  def test_cacr_algorithm_3(self, intra_batch, views):
    t_pos, t_neg = 1.5, 2.0
    queue = unit(torch.tensor(embeddings(1, batch=7, seed=1)[0], dtype=torch.float64))
    keys = [unit(torch.tensor(k, dtype=torch.float64)) for k in embeddings(views, seed=2)]

    def algorithm_3(*q_list):
      loss = 0.0
      for i, q in enumerate(map(unit, q_list)):
        others = torch.stack([k for j, k in enumerate(keys) if j != i])
        cost_pos = (q - others).norm(p=2, dim=-1).pow(2).transpose(1, 0)
        weights_pos = torch.softmax(cost_pos.detach() * t_pos, dim=1)
        cost_neg = 2 - 2 * q @ queue.T
        if intra_batch:
          distances = (2 - 2 * q @ q.T)[~torch.eye(B, dtype=torch.bool)].view(B, B - 1)
          cost_neg = torch.cat([cost_neg, distances], dim=1)
        weights_neg = torch.softmax(-t_neg * cost_neg, dim=1)
        loss += (cost_pos * weights_pos).sum(1).mean() - (cost_neg * weights_neg).sum(1).mean()
      return loss / views

    key_arrays = np.stack([k.numpy() for k in keys], axis=1).astype(np.float32)

    def actual(*q_list):
      loss = 0.0
      for i, q in enumerate(q_list):
        others = np.delete(key_arrays, i, axis=1)
        pos, neg, where = pairs.with_queue(q, others, queue.numpy().astype(np.float32), in_batch=intra_batch)
        loss += losses.cacr(pos, neg, t_pos=t_pos, t_neg=t_neg, where=where, stop_positive_weights=True).mean()
      return loss / views

    self.assert_same(actual, embeddings(views), algorithm_3)

  @parameterized.parameters(2, 3)
  def test_cacr_authors_pairs_of_views(self, views):
    """The mean over views of the attraction and the mean over pairs x < y of the repulsion of x from y."""
    t_pos, t_neg = 1.0, 0.9

    def authors(*z):
      z = [unit(x) for x in z]
      attraction = repulsion = 0.0
      for x in range(views):
        cost = torch.stack([(z[x] - z[y]).pow(2).sum(-1) for y in range(views) if y != x], dim=1)
        attraction += (cost * torch.softmax(t_pos * cost, dim=1)).sum(1).mean() / views
      count = views * (views - 1) // 2
      for x in range(views):
        for y in range(x + 1, views):
          cost = (z[x][:, None] - z[y]).pow(2).sum(-1)[~torch.eye(B, dtype=torch.bool)].view(B, B - 1)
          repulsion -= (cost * torch.softmax(-t_neg * cost, dim=1)).sum(1).mean() / count
      return attraction + repulsion

    def actual(*z):
      pos, neg, where = pairs.by_view_pair(*z)
      return losses.cacr(pos, neg, t_pos=t_pos, t_neg=t_neg, where=where).mean()

    self.assert_same(actual, embeddings(views), authors)

  def test_macl_formula(self):
    """MACL: tau from the detached alignment, InfoNCE weighted by the detached 1 / (1 - P); keys as negatives."""
    tau0, alpha, threshold = 0.2, 0.5, 0.1

    def formula(f, g):
      s = unit(f) @ unit(g).T
      alignment = s.diagonal().mean().detach()
      p = torch.softmax(s / (tau0 * (1 + alpha * (alignment - threshold))), dim=1).diagonal()
      return (-torch.log(p) / (1 - p).detach()).mean()

    def actual(f, g):
      pos, neg, where = pairs.with_keys(f, g)
      return losses.macl(pos, neg, tau0=tau0, alpha=alpha, threshold=threshold, where=where).mean()

    self.assert_same(actual, embeddings(2), formula)

  @parameterized.parameters(0.0, 0.1, 0.6)
  def test_hcl_estimator(self, tau_plus):
    """Robinson et al.: negatives reweighted, debiased by tau_plus, at least N e^(-1/tau); gradients flow through it."""
    beta, tau = 1.0, 0.5

    def estimator(z1, z2):
      z1, z2 = unit(z1), unit(z2)
      z = torch.cat([z1, z2])
      keep = ~torch.eye(B, dtype=torch.bool).repeat(2, 2)
      neg = torch.exp(z @ z.T / tau)[keep].view(2 * B, -1)
      pos = torch.exp((z1 * z2).sum(-1) / tau).repeat(2)
      n = 2 * B - 2
      importance = neg**beta
      reweighted = (importance * neg).sum(-1) / importance.mean(-1)
      g = (-tau_plus * n * pos + reweighted) / (1 - tau_plus)
      g = torch.clamp(g, min=n * np.exp(-1 / tau))
      return -torch.log(pos / (pos + g)).mean()

    def actual(z1, z2):
      pos, neg, where = pairs.in_batch(z1, z2)
      return losses.hard_negative(pos, neg, tau, beta=beta, tau_plus=tau_plus, where=where).mean()

    self.assert_same(actual, embeddings(2), estimator)

  @parameterized.parameters('far', 'uniform')
  def test_cacr_with_a_margin(self, weights):
    """CACR B.5: [E_π⁺ c(x, x⁺) - E_π⁻ c(x, x⁻) + m]₊; with uniform π it is the generic triplet loss."""
    t_pos, t_neg, margin = 1.5, 2.0, dict(far=0.2, uniform=1.95)[weights]

    def formula(*z):
      z, total = [unit(x) for x in z], 0.0
      for v, x in enumerate(z):
        others = torch.stack([y for w, y in enumerate(z) if w != v], dim=1)
        near = (x[:, None] - others).pow(2).sum(-1)
        keys = torch.cat(list(z))
        own = torch.arange(B).repeat(len(z))[None] == torch.arange(B)[:, None]
        apart = (x[:, None] - keys).pow(2).sum(-1)[~own].view(B, -1)
        if weights == 'uniform':
          cost = near.mean(1) - apart.mean(1)
        else:
          cost = (near * torch.softmax(t_pos * near, 1)).sum(1) - (apart * torch.softmax(-t_neg * apart, 1)).sum(1)
        total = total + torch.relu(cost + margin).mean() / len(z)
      return total

    def actual(*z):
      pos, neg, where = pairs.in_batch(*z)
      chosen = dict(positive_weights=weights, negative_weights='uniform' if weights == 'uniform' else 'near')
      return losses.cacr_margin(pos, neg, margin=margin, t_pos=t_pos, t_neg=t_neg, where=where, **chosen).mean()

    views = [x + 2 * y for x, y in zip(embeddings(3), embeddings(1, seed=3) * 3, strict=True)]  # alike
    self.assert_same(actual, views, formula)
    chosen = {} if weights == 'far' else dict(positive_weights='uniform', negative_weights='uniform')
    values = jax.jit(lambda *z: losses.cacr_margin(*pairs.in_batch(*z)[:2], margin=margin, t_pos=t_pos, **chosen))(
      *views
    )
    self.assertTrue(0 < np.mean(values == 0) < 1, 'both sides of the hinge')

  def test_dclw_formula(self):
    sigma, tau = 0.5, 0.1

    def formula(z1, z2):
      z1, z2 = unit(z1), unit(z2)
      total = 0.0
      pos = (z1 * z2).sum(-1)
      weight = (2 - B * torch.softmax(pos / sigma, dim=0)).detach()
      for x, y in ((z1, z2), (z2, z1)):
        s = torch.cat([x @ x.T, x @ y.T], dim=1)[~torch.eye(B, dtype=torch.bool).repeat(1, 2)].view(B, -1)
        total += (-weight * pos / tau + torch.logsumexp(s / tau, dim=1)).mean() / 2
      return total

    def actual(z1, z2):
      pos, neg, where = pairs.in_batch(z1, z2)
      return losses.decoupled_weighted(pos, neg, tau, sigma=sigma, where=where).mean()

    self.assert_same(actual, embeddings(2), formula)


if __name__ == '__main__':
  absltest.main()
