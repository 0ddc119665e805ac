"""CACR's figures from results and from a workdir, and its benchmark, at small size."""

import jax
import numpy as np
import pytest

from benchmarks import positives
from experiments.cacr import figures, samples
from experiments.cacr.sweep import ENTROPY, LINEAR, SWEEP
from ssl_jax import train
from tests.helpers import tiny
from tests.test_paper_figures import record


def test_figures_are_drawn_from_the_rows_that_were_run(tmp_path, capsys):
  out = tmp_path / 'out'
  out.mkdir()
  assert figures.main(tmp_path / 'nothing', out) == []
  for name, accuracy in {'cacr_k1': 83.0, 'cacr_k2': 84.0, 'cacr_k4': 86.0, 'cl': 83.5, 'cl_batch_64': 80.0}.items():
    record(tmp_path / 'cacr', SWEEP, name, metrics={LINEAR: accuracy})
  history = {'linear': [(10.0, 50.0), (20.0, 60.0)], ENTROPY: [(10.0, 6.0), (20.0, 6.5)]}
  for name in ('cl_curve', 'cacr_k4_curve'):
    record(tmp_path / 'cacr', SWEEP, name, metrics={}, history=history)
  capsys.readouterr()
  drawn = figures.main(tmp_path / 'cacr', out)
  assert [path.name for path in drawn] == ['entropy.svg', 'batch_sizes.svg', 'positives.svg', 'epochs.svg']
  assert 'batch_sizes.svg (Figure 8): 4 of 90 rows were run' in capsys.readouterr().out
  results = {'cl': [{'metrics': {LINEAR: 83.5}}], 'cl_batch_64': [{'metrics': {LINEAR: 80.0}}]}
  lines = figures.batch_sizes(results).axes[0].lines
  assert [line.get_xydata().tolist() for line in lines] == [[[64, 80.0], [768, 83.5]]]
  (line,) = figures.positives({f'cacr_k{k}': [{'metrics': {LINEAR: 80.0 + k}}] for k in (4, 1)}).axes[0].lines
  assert line.get_xydata().tolist() == [[1, 81.0], [4, 84.0]]


def test_weights_are_those_of_the_loss():
  """Eq. 3 and 4 by hand, and far positives and near negatives have the largest ones."""
  rng = np.random.default_rng(0)
  unit = lambda *shape: (lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True))(rng.normal(size=shape))
  found = samples.Sample(unit(4), unit(4, 4), unit(20, 4), np.zeros((25, 2, 2, 3), np.uint8), 1.5, 2.0)
  near, apart = samples.weights(found)
  for weights, others, t in ((near, found.positives, 1.5), (apart, found.negatives, -2.0)):
    raw = np.exp(t * np.sum((others - found.query) ** 2, axis=1))
    np.testing.assert_allclose(weights, raw / raw.sum(), rtol=1e-6)
  assert near.argmax() == (found.positives @ found.query).argmin()
  assert apart.argmax() == (found.negatives @ found.query).argmax()


@pytest.mark.slow
def test_a_query_and_its_mini_batch_are_drawn(tmp_path, monkeypatch):
  monkeypatch.setattr(samples, 'BATCH', 12)
  workdir = tmp_path / 'run'
  train.train(tiny(tmp_path, steps=2, loss=dict(name='cacr', t_neg=0.9), temperature=dict(name='none')), workdir)
  found = samples.sample(workdir, batch=12)
  assert found.positives.shape == (4, 8) and found.negatives.shape == (11, 8) and found.t_neg == 0.9
  assert found.pictures.shape == (16, 12, 12, 3) and found.pictures.dtype == np.uint8
  assert (found.positives @ found.query).mean() > (found.negatives @ found.query).mean()
  assert samples.main('weights', [workdir]).read_bytes()[:4] == b'\x89PNG'
  assert '<svg' in samples.main('tsne', [workdir, workdir]).read_text()
  with pytest.raises(ValueError, match='is not a figure of workdirs: give weights WORKDIR'):
    samples.main('tsen', [workdir])


@pytest.mark.slow
def test_the_benchmark_measures_the_step_of_a_config():
  """The loss of more positives takes more memory; a step of CACR on MoCo v2 runs."""
  sizes = {}
  for k in (1, 4):
    program, given = positives.loss('configs/cifar10.py:cacr', f'views={k + 1}', 'batch_size=16')
    assert len(program(*given)) == k + 1
    sizes[k] = positives.timing.jax_memory(program, *given)
  assert sizes[4] > sizes[1]
  small = ('batch_size=8', 'model.width=2', 'model.stage_sizes=(1,)', 'data.image_size=12', 'method.queue=16')
  program, given = positives.step('configs/imagenet.py:cacr_moco_k1', 'dtype=float32', *small)
  state, metrics = jax.device_get(program(*given))
  assert int(state.step) == 1 and np.isfinite(metrics['loss'])
