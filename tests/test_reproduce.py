"""The papers' tables and figures: each has its runs or its command, and every config of them trains."""

import collections
import doctest
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image

from configs import base, finetune
from experiments import papers, tables
from ssl_jax import config
from ssl_jax.data.views import augment_settings
from ssl_jax.evals import evaluate
from ssl_jax.evals.finetune import require_weights
from ssl_jax.run import builder
from tests import page

ROOT = pathlib.Path(__file__).parent.parent


# The page


@pytest.mark.parametrize('name', papers.PAPERS)
def test_rows_name_tables_and_figures_that_exist(name):
  paper = papers.PAPERS[name]
  items = [item.name for item in paper.items]
  assert len(set(items)) == len(items)
  for sweep in paper.sweeps:
    for row in papers.sweep(sweep).rows:
      assert set(row.shows) <= set(items), row.name


@pytest.mark.parametrize('name', papers.PAPERS)
def test_every_table_and_figure_has_a_command(name):
  paper = papers.PAPERS[name]
  known = {sweep: collections.defaultdict(lambda: 'ready') for sweep in paper.sweeps}
  for item in paper.items:
    status, commands = papers.describe(paper, item, known)
    assert bool(commands) != bool(item.nothing), item.name
    assert status != 'no command', item.name
    for command in commands:
      words = command.split()
      file = f'{words[2].replace(".", "/")}.py' if words[1] == '-m' else words[1]
      assert words[0] == 'python' and (ROOT / file).exists(), command


def test_the_page_has_every_table_and_figure_and_every_run():
  page = papers.markdown()
  sections = page.split('\n## ')
  assert len(sections) == len(papers.PAPERS)
  for section, paper in zip(sections, papers.PAPERS.values(), strict=True):
    for item in paper.items:
      assert f'| {item.name} | {item.about} |' in section
    for sweep in paper.sweeps:
      for row in papers.sweep(sweep).rows:
        assert f'| `{row.name}` |' in section
  assert '| `cosine` |' in page and '| run | `configs/cifar10.py:dystress` |' in page
  assert '| needs SVHN | `configs/svhn.py:memory_bank_hard' in page


def test_the_status_of_a_row_follows_from_its_results_and_its_data(tmp_path):
  found = papers.statuses('long_tail', tmp_path)
  assert set(found.values()) == {'ready'}
  (tmp_path / 'long_tail').mkdir()
  tables.append(tmp_path / 'long_tail' / 'results.jsonl', {'name': 'cosine'})
  assert papers.statuses('long_tail', tmp_path) == found | {'cosine': 'run'}
  assert papers.statuses('fine_tuning', tmp_path)['mura_dcl'] == 'needs MURA and encoders pretrained on ImageNet-1K'
  assert papers.statuses('sentences', tmp_path)['simcse'] == 'needs the weights of BERT'


def test_the_examples_of_the_page_hold():
  failed, attempted = doctest.testmod(papers)
  assert attempted and not failed


# Fine-tuning (DySTreSS, Table 11)


def test_the_printed_class_weights_belong_to_the_classes():
  weights = lambda name: config.load(f'configs/finetune.py:{name}').eval.class_weights
  # A.2: positive class weights of MURA, ISIC 2016 and MHIST; the four of Chaoyang in the order of its class sizes.
  assert [weights(name) for name in ('mura', 'isic2016', 'mhist')] == [(1, 0.7097), (1, 4.24), (1, 2.45)]
  chaoyang = dict(normal=1.264, serrated=1.667, adenocarcinoma=1.0, adenoma=2.114)
  assert weights('chaoyang') == tuple(chaoyang[name] for name in sorted(chaoyang))
  rates = {name: config.load(f'configs/finetune.py:{name}').eval.finetune_learning_rate for name in finetune.VARIANTS}
  assert {name for name, rate in rates.items() if rate == 1.0} == {'mura', 'isic2016', 'mhist'}
  assert set(rates.values()) == {0.1, 1.0}


def test_class_weights_must_fit_the_classes():
  with pytest.raises(
    ValueError, match=r'eval.class_weights = \(1.0, 2.45\) must be one number for each of the 4 classes'
  ):
    require_weights((1.0, 2.45), 4)
  with pytest.raises(ValueError, match=r'eval.class_weights = \(1.0, -2.0\) must be positive numbers'):
    chosen = config.load('configs/finetune.py:mhist', ['eval.class_weights=(1.0, -2.0)'])
    config.validate(chosen, base.get_config())


@pytest.mark.slow
def test_a_folder_is_fine_tuned(tmp_path):
  rng = np.random.default_rng(0)
  for split, count in (('train', 8), ('test', 3)):
    for name, grey in (('HP', 60), ('SSA', 190)):
      folder = tmp_path / 'mhist' / split / name
      folder.mkdir(parents=True)
      for i in range(count):
        pixels = np.clip(grey + rng.normal(0, 20, (20, 20, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png')
  small = ['data.image_size=16', 'model.width=4', 'model.stage_sizes=(1,)', 'init=random', 'projector.features=(4,4)']
  small += [f'data.path={tmp_path / "mhist"}', 'parallel.devices=1', 'eval.batch_size=8', 'dtype=float32']
  chosen = config.load('configs/finetune.py:mhist', small)
  config.validate(chosen, base.get_config())
  results = evaluate.evaluate(chosen, str(tmp_path / 'run'))
  assert results['finetune'] > 60
  used = results['finetune_settings']
  assert (used['learning_rate'], tuple(used['class_weights']), used['epochs']) == (1.0, (1.0, 2.45), 50)
  assert used['batch'] == used['images'] and used['learning_rate_scale'] == used['batch'] / 128
  wrong = config.load('configs/finetune.py:chaoyang', small)
  with pytest.raises(ValueError, match='must be one number for each of the 2 classes'):
    evaluate.evaluate(wrong, str(tmp_path / 'other'))


# Every config of the page, at small size


SWEEPS = list(dict.fromkeys(sweep for sweep, _ in page.ROWS))


def parts(chosen):
  """What a run is made of: its method with its loss, temperature and views together, everything else by itself."""
  number = lambda x: 'a number' if isinstance(x, float) else x
  method = {key: number(value) for key, value in config.flatten(chosen.method).items()}
  names = [chosen.loss.name, chosen.temperature.name, min(chosen.views, 3), chosen.small_crops.number > 0]
  found = {json.dumps([method, *names])}
  found |= {(key, chosen[key].name) for key in ('model', 'projector', 'optimizer', 'imbalance')}
  if chosen.data.source != 'text':
    found |= {('augment', name) for name, value in augment_settings(chosen)[0].items() if value}
  return found


def shallow(chosen):
  """One block per stage, or one layer."""
  stages = chosen.model.name.startswith('resnet')
  if stages or chosen.model.name.startswith(('vit', 'bert')):
    config.override(chosen, 'model.stage_sizes' if stages else 'model.depth', (1, 1, 1, 1) if stages else 1)
  return chosen


def light(chosen, seen):
  """The tiniest encoder and the simplest views, where those of the config were trained with before."""
  if chosen.data.source == 'text':
    return shallow(chosen)
  config.override(chosen, 'model', dict(name='resnet_tiny', width=4, stage_sizes=(1,)))
  if {part for part in parts(chosen) if part[0] == 'augment'} <= seen:
    config.override(chosen, 'augment', dict(name='none', crop=True, flip=0.5))
    chosen.augment_other = {}
  return chosen


@functools.cache
def representatives(folder):
  """{sweep: [(row, its small config), ...]}: whatever a run of the page is made of (`parts`) is among them.

  The first of each encoder is that encoder, with few layers: compiling every run at full depth would take hours.
  """
  seen, found = set(), {}
  for sweep, row in page.ROWS:
    chosen = page.small(row, sweep, folder)
    own, encoder = parts(chosen), ('model', chosen.model.name)
    if not own <= seen:
      found.setdefault(sweep, []).append((row, light(chosen, seen) if encoder in seen else shallow(chosen)))
    seen |= own
  return found


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return page.data(tmp_path_factory.mktemp('data'))


@pytest.mark.slow
@pytest.mark.parametrize('sweep', SWEEPS)
def test_every_config_of_the_page_builds(sweep, folder):
  """The data are read, and the network is traced at its own depth; nothing is compiled."""
  rows = [row for name, row in page.ROWS if name == sweep]
  assert rows
  for row in rows:
    builder.build(page.small(row, sweep, folder))


@pytest.mark.slow
@pytest.mark.parametrize('sweep', SWEEPS)
def test_whatever_the_configs_are_made_of_takes_two_steps(sweep, folder):
  for row, chosen in representatives(folder).get(sweep, ()):
    assert np.isfinite(page.two_steps(chosen)).all(), row.name
  jax.clear_caches()
