"""The probe beside the encoder: torch's Adam, its numbers in the records, and nothing of it in the encoder."""

import json

import chex
import jax
import numpy as np
import pytest
import torch

from ssl_jax import train
from ssl_jax.run.online_probe import Probe
from ssl_jax.workdir import metric_log
from tests.test_train import final, tiny


def test_its_steps_are_torch_s():
  rng = np.random.default_rng(0)
  labels, features = rng.integers(3, size=40), rng.normal(size=(6, 8, 5)).astype(np.float32)
  index = rng.integers(40, size=(6, 8))
  probe = Probe(labels, rate=0.05)
  state = probe.init(5)
  linear = torch.nn.Linear(5, 3, dtype=torch.float64)
  torch.nn.init.zeros_(linear.weight)
  torch.nn.init.zeros_(linear.bias)
  adam = torch.optim.Adam(linear.parameters(), lr=0.05)
  for x, i in zip(features, index, strict=True):
    state, watched = jax.jit(probe.update)(state, x, i)
    logits = linear(torch.from_numpy(x.astype(np.float64)))
    y = torch.from_numpy(labels[i])
    loss = torch.nn.functional.cross_entropy(logits, y)
    np.testing.assert_allclose(watched['probe_loss'], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(watched['probe_train'], 100 * (logits.argmax(1) == y).double().mean(), rtol=1e-5)
    adam.zero_grad()
    loss.backward()
    adam.step()
  np.testing.assert_allclose(state['weights']['kernel'], linear.weight.detach().numpy().T, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(state['weights']['bias'], linear.bias.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_the_encoder_does_not_know_of_it(tmp_path):
  """With and without a probe the encoder is the same, up to rounding; on two devices the probe is that of one."""
  small = dict(steps=6, **{'eval.every_epochs': 1, 'eval.k': ()})
  runs = {'without': {}, 'with': {'probe': 0.3}, 'two': {'probe': 0.3, 'parallel.devices': 2}}
  found = {}
  for name, changes in runs.items():
    chosen = tiny(tmp_path, **small, **changes)
    train.train(chosen, tmp_path / name)
    found[name] = final(tmp_path / name, chosen)
  (losses, state), (other_losses, other) = found['without'], found['with']
  np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
  weights = ((s.params, s.batch_stats) for s in (state, other))
  chex.assert_trees_all_close(*weights, rtol=1e-4, atol=1e-6)
  chex.assert_trees_all_close(found['two'][1].extra['probe'], other.extra['probe'], rtol=1e-3, atol=1e-5)
  rows = metric_log.read(tmp_path / 'with')
  assert [row['step'] for row in rows if 'probe' in row] == [2, 4, 6]
  assert all({'probe_loss', 'probe_train'} <= row.keys() for row in rows if 'loss' in row)
  watched = [row['probe_loss'] for row in rows if 'loss' in row]
  assert watched[0] == pytest.approx(np.log(4))  # it begins at zero, of four classes
  assert watched[-1] < watched[0]
  assert rows[-1]['probe'] > 25
  assert json.loads((tmp_path / 'with' / 'summary.json').read_text())['probe'] == rows[-1]['probe']


def test_without_labels_it_is_refused(tmp_path):
  tiny(tmp_path)
  with np.load(tmp_path / 'data.npz') as stored:
    np.savez(tmp_path / 'unlabelled.npz', train_images=stored['train_images'], test_images=stored['test_images'])
  chosen = tiny(tmp_path, probe=0.01, **{'data.path': str(tmp_path / 'unlabelled.npz'), 'eval.k': ()})
  with pytest.raises(ValueError, match=r'probe = 0\.01 needs labels'):
    train.train(chosen, tmp_path / 'run')
