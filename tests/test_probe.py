"""The online probe: it learns as with torch's Adam, its metrics are logged, and the encoder is unaffected."""

import json

import chex
import jax
import numpy as np
import pytest
import torch

from ssl_jax import train
from ssl_jax.run.online_probe import OnlineProbe
from ssl_jax.workdir import metric_log
from tests.helpers import final, tiny


def test_steps_match_torch():
  rng = np.random.default_rng(0)
  labels, features = rng.integers(3, size=40), rng.normal(size=(6, 8, 5)).astype(np.float32)
  index = rng.integers(40, size=(6, 8))
  probe = OnlineProbe(labels, learning_rate=0.05)
  state = probe.init(5)
  linear = torch.nn.Linear(5, 3, dtype=torch.float64)
  torch.nn.init.zeros_(linear.weight)
  torch.nn.init.zeros_(linear.bias)
  adam = torch.optim.Adam(linear.parameters(), lr=0.05)
  for x, i in zip(features, index, strict=True):
    state, metrics = jax.jit(probe.update)(state, x, i)
    logits = linear(torch.from_numpy(x.astype(np.float64)))
    y = torch.from_numpy(labels[i])
    loss = torch.nn.functional.cross_entropy(logits, y)
    np.testing.assert_allclose(metrics['online_probe_loss'], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(metrics['online_probe_train'], 100 * (logits.argmax(1) == y).double().mean(), rtol=1e-5)
    adam.zero_grad()
    loss.backward()
    adam.step()
  np.testing.assert_allclose(state['weights']['kernel'], linear.weight.detach().numpy().T, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(state['weights']['bias'], linear.bias.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_encoder_is_unaffected(tmp_path):
  """The encoder is the same with and without a probe, up to rounding; the probe is the same on one and two devices."""
  small = dict(steps=6, **{'eval.every_epochs': 1, 'eval.k': ()})
  runs = {'without': {}, 'with': {'online_probe': 0.3}, 'two': {'online_probe': 0.3, 'parallel.devices': 2}}
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
  assert [row['step'] for row in rows if 'online_probe' in row] == [2, 4, 6]
  assert all({'online_probe_loss', 'online_probe_train'} <= row.keys() for row in rows if 'loss' in row)
  probe_losses = [row['online_probe_loss'] for row in rows if 'loss' in row]
  assert probe_losses[0] == pytest.approx(np.log(4))  # four classes, and weights of zero
  assert probe_losses[-1] < probe_losses[0]
  assert rows[-1]['online_probe'] > 25
  assert json.loads((tmp_path / 'with' / 'summary.json').read_text())['online_probe'] == rows[-1]['online_probe']


def test_a_dataset_without_labels_is_refused(tmp_path):
  tiny(tmp_path)
  with np.load(tmp_path / 'data.npz') as stored:
    np.savez(tmp_path / 'unlabelled.npz', train_images=stored['train_images'], test_images=stored['test_images'])
  chosen = tiny(tmp_path, online_probe=0.01, **{'data.path': str(tmp_path / 'unlabelled.npz'), 'eval.k': ()})
  with pytest.raises(ValueError, match=r'online_probe = 0\.01 needs labels'):
    train.train(chosen, tmp_path / 'run')
