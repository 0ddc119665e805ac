"""The papers' figures that are drawn from runs: from the results so far, with what is missing left empty."""

import re

import numpy as np
import pytest

from experiments import pictures, tables
from experiments.balanced import figures as balanced
from experiments.behaviour import figures as behaviour
from experiments.behaviour import tsne
from experiments.dystress import figures as dystress
from experiments.dystress import sweep as dystress_sweep
from ssl_jax import train
from ssl_jax.reporting import figures
from tests.helpers import tiny
from tests.test_experiments import result


def row_of(sweep, name):
  return next(row for row in sweep.rows if row.name == name)


def record(folder, sweep, name, **more):
  folder.mkdir(exist_ok=True)
  tables.append(folder / 'results.jsonl', result(sweep, row_of(sweep, name), 0, **more))


@pytest.fixture
def lee(tmp_path):
  """Results of two cells of the grid, of the gaps over epochs and of three augmentations."""
  sweep = balanced.sweep.SWEEP
  for name, accuracy in {'balanced_2_4': 86.0, 'balanced_1_8': 70.0}.items():
    record(tmp_path / 'balanced', sweep, name, metrics={'linear': accuracy})
  history = {name: [(10.0, 0.5), (20.0, 0.25)] for name in balanced.sweep.GAPS}
  record(tmp_path / 'balanced', sweep, 'bounds', metrics={'linear': 85.0}, history=history)
  for name in ('nt_xent', 'nt_xent_cutout', 'nt_xent_noise'):
    metrics = {'linear': 80.0, 'projector/prototype_bias_sampled': 1.2}
    record(tmp_path / 'balanced', sweep, name, metrics=metrics)
  return tmp_path


def test_the_grid_is_a_heat_map_with_empty_cells(lee):
  found = {name: [result_] for (name, _), result_ in tables.done(balanced.sweep.SWEEP, lee / 'balanced').items()}
  values = balanced.grid_values(found, 'balanced')
  assert values[2, 1] == 86 and values[3, 0] == 70  # rows are λ, columns α
  assert np.isnan(values).sum() == 14 and np.isnan(balanced.grid_values(found, 'generalized_nt_xent')).all()
  figure = balanced.grid(found)
  shown = [np.ma.getmaskarray(axis.images[0].get_array()).sum() for axis in figure.axes[:2]]
  assert shown == [14, 16], 'cells without a run are empty'
  assert [text.get_text() for text in figure.axes[0].texts] == ['86.0', '70.0']


def test_the_figures_of_lee_are_drawn_from_results(lee, tmp_path):
  out = tmp_path / 'out'
  out.mkdir()
  assert [path.name for path in balanced.main(lee, out)] == ['grid.svg', 'bias.svg', 'gaps.svg']
  gaps, bias = (out / 'gaps.svg').read_text(), (out / 'bias.svg').read_text()
  assert '>attracting gap</text>' in gaps and '>repelling gap</text>' in gaps
  assert '>base</text>' in bias and '>with cutout</text>' in bias and '>with rotation</text>' not in bias
  assert balanced.main(tmp_path / 'nothing', out) == []


def test_the_figures_of_dystress_are_drawn_from_results(tmp_path, capsys):
  metrics = {dystress_sweep.KNN: 85.0, dystress_sweep.UNIFORMITY: -2.5, dystress.TOLERANCE: 0.4}
  for name in ('cosine', 'shifted_-0.2', 'cosine_learning_rate_0.03', 'cifar100_cosine'):
    record(tmp_path / 'dystress', dystress_sweep.SWEEP, name, metrics=metrics)
  drawn = dystress.from_results(tmp_path)
  assert set(drawn) == {'shifts', 'learning_rates'}, 'a figure needs two of its rows'
  labels = [label.get_text() for label in drawn['learning_rates'].axes[0].get_xticklabels()]
  assert labels == ['0.03', '0.06']
  assert len(drawn['shifts'].axes) == 3
  said = capsys.readouterr().out
  assert 'ranges: not run yet: cosine_0.07_0.1' in said and 'ranges_imagenet100: not run yet: dystress' in said


def test_the_histograms_come_from_two_workdirs(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(dystress, 'from_results', dict)
  monkeypatch.chdir(tmp_path)
  assert dystress.main(out=tmp_path) == []
  assert 'no evaluation.npz in runs/dystress/untrained_seed0, runs/dystress/cosine_seed0' in capsys.readouterr().out
  arrays = {'similarities_edges': np.linspace(-1, 1, 11)} | {f'similarities_{k}': np.arange(10) for k in figures.PAIRS}
  for name in ('before', 'after'):
    (tmp_path / name).mkdir()
    np.savez(tmp_path / name / 'evaluation.npz', **arrays)
  assert dystress.main([tmp_path / 'before', tmp_path / 'after'], tmp_path) == [tmp_path / 'histograms.svg']
  text = (tmp_path / 'histograms.svg').read_text()
  assert '>before training</text>' in text and '>false negatives</text>' in text
  with pytest.raises(ValueError, match='1 workdirs: give two'):
    dystress.main([tmp_path / 'before'])


def test_simclr_by_its_temperature_next_to_dystress(tmp_path):
  sweep, drawn = dystress_sweep.SWEEP, tmp_path / 'temperatures.svg'
  # 0.2 has two seeds; a variant of 0.2 is not a point of the curve; DySTreSS and CIFAR-100 have not been run.
  for name, seed, score in (('simclr_0.1', 0, 81.0), ('simclr_0.2', 0, 85.0), ('simclr_0.2', 1, 87.0)):
    row = row_of(sweep, name)
    tables.append(tmp_path / 'results.jsonl', result(sweep, row, seed, metrics={dystress_sweep.KNN: score}))
  record(tmp_path, sweep, 'simclr_0.2_plain_sgd', metrics={dystress_sweep.KNN: 1.0})
  pictures.draw(sweep, tmp_path)
  text = drawn.read_text()
  assert 'CIFAR-10</text>' in text and 'CIFAR-100</text>' in text
  assert '>SimCLR, here</text>' in text and '>DySTreSS, paper</text>' in text and '>DySTreSS, here</text>' not in text
  figure = sweep.figures['temperatures'](sweep, tables.by_row(sweep, tmp_path))
  (line,) = [line for line in figure.axes[0].lines if line.get_marker() == 'o']
  np.testing.assert_allclose(line.get_xydata(), [(0.1, 81.0), (0.2, 86.0)])
  record(tmp_path, sweep, 'cifar100_cosine', metrics={dystress_sweep.KNN: 57.0})
  pictures.draw(sweep, tmp_path)
  assert '>DySTreSS, here</text>' in drawn.read_text()


def record_behaviour(folder, names):
  edges = np.linspace(-1, 1, 81).tolist()
  curves = {'separation_mean': [0.9] + [0.5] * 10, 'separation_std': [0.1] * 11, 'similarities_edges': edges}
  curves |= {f'similarities_{kind}': list(range(80)) for kind in ('TP', 'FN', 'TN')}
  metrics = {'linear': 80.0, 'projector/uniformity': -3.5, 'projector/same_label_similarity': 0.2}
  for name in names:
    record(folder, behaviour.SWEEP, name, metrics=metrics, curves=curves)


def test_the_figures_are_drawn_from_the_results_so_far(tmp_path, capsys):
  assert behaviour.main(tmp_path, tmp_path) == []
  record_behaviour(tmp_path, ('contrastive_0.3', 'contrastive_1.0', 'simple'))
  drawn = behaviour.main(tmp_path, tmp_path)
  assert {path.stem for path in drawn} == {'temperatures', 'separation', 'similarities'}
  for path in drawn:
    assert path.read_text().count('<path') > 5
  said = capsys.readouterr().out.splitlines()[-1].removeprefix('not run yet: ').split(', ')
  assert 'hard_simple' in said and 'contrastive_0.3' not in said


def test_each_loss_has_its_own_line_of_panels(tmp_path):
  names = ['simple', *(f'hard_{tau}' for tau in (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2)), 'hard_simple', 'contrastive_0.3']
  record_behaviour(tmp_path, names)
  behaviour.main(tmp_path, tmp_path)
  text = (tmp_path / 'separation.svg').read_text()
  titles = re.findall('>((?:contrastive|hard|simple)[^<]*)</text>', text)
  hard = [f'hard, τ = {tau}' for tau in (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)]  # six fit into a line
  assert titles == ['contrastive, τ = 0.3', *hard, 'simple, weight 1/49,999', 'hard simple, weight 1/4,095']
  assert text.count('>pos</text>') == 6  # one below each column


def test_each_data_set_has_its_own_figures(tmp_path):
  record_behaviour(tmp_path, ('svhn_hard_0.3', 'svhn_triplet', 'triplet'))
  drawn = {path.name: path.read_text() for path in behaviour.main(tmp_path, tmp_path)}
  assert not [name for name, text in drawn.items() if 'mathdefault' in text]  # the style turns off math
  names = ('temperatures', 'separation', 'similarities')
  assert set(drawn) == {f'{name}{ending}.svg' for name in names for ending in ('', '_svhn')}
  assert 'SVHN</text>' in drawn['separation_svhn.svg'] and 'SVHN</text>' not in drawn['separation.svg']


def test_tsne_keeps_clusters_apart():
  rng = np.random.default_rng(0)
  labels = np.repeat(np.arange(3), 20)
  x = np.eye(8)[labels] + 0.05 * rng.normal(size=(60, 8))
  points = tsne.plane(x.astype(np.float32))
  centers = np.stack([points[labels == c].mean(axis=0) for c in range(3)])
  nearest = np.linalg.norm(points[:, None] - centers[None], axis=2).argmin(axis=1)
  np.testing.assert_array_equal(nearest, labels)
  np.testing.assert_array_equal(points, tsne.plane(x.astype(np.float32)))
  assert len(tsne.draw({'a': (points, labels), 'b': (points, labels)}).axes) == 2


def test_tsne_says_which_runs_are_missing(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert tsne.main(out=tmp_path / 'tsne.svg') is None
  said = capsys.readouterr().out
  assert 'no checkpoint in runs/behaviour/contrastive_0.07_seed0, runs/behaviour/contrastive_0.2_seed0' in said


@pytest.mark.slow
def test_tsne_of_a_run(tmp_path):
  train.train(tiny(tmp_path, steps=2), str(tmp_path / 'run'))
  x, labels = tsne.embeddings(tmp_path / 'run')
  assert x.shape == (16, 8) and labels.shape == (16,)
  np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-5)
  assert tsne.main([tmp_path / 'run'], tmp_path / 'tsne.svg') == tmp_path / 'tsne.svg'
  assert '>run</text>' in (tmp_path / 'tsne.svg').read_text()
