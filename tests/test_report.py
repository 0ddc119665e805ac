"""The report of a run: its numbers are those on disk, it is self-contained, and a browser displays it."""

import html
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from PIL import Image

from configs import base
from ssl_jax import train
from ssl_jax.config import restore
from ssl_jax.evals import evaluate
from ssl_jax.reporting import charts, compare, figures, page, report
from ssl_jax.workdir import metric_log
from tests.helpers import needs_browser, tiny

pytestmark = pytest.mark.slow  # it trains, evaluates and draws

CHROMIUM = shutil.which('chromium')
FLAGS = (
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
  '--hide-scrollbars',
  '--enable-logging=stderr',
  '--window-size=1400,900',
)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """An evaluated run of a few steps with its report, and a copy with another seed and slightly larger numbers."""
  folder = tmp_path_factory.mktemp('runs')
  chosen = tiny(folder, steps=4, temperature=dict(name='cosine', tau_min=0.2, tau_max=0.5), **{'eval.k': (1, 5)})
  train.train(chosen, folder / 'seed0')
  evaluation = evaluate.evaluate(chosen, folder / 'seed0')
  shutil.copytree(folder / 'seed0', folder / 'seed1')
  larger = lambda x: (
    {k: larger(v) for k, v in x.items()} if isinstance(x, dict) else x + 0.25 if type(x) is float else x
  )
  (folder / 'seed1' / 'evaluation.json').write_text(
    json.dumps(larger(evaluation) | {'settings': evaluation['settings']})
  )
  (folder / 'seed1' / 'config.json').write_text(json.dumps(chosen.to_dict() | {'seed': 1}))
  report.report(folder / 'seed0')
  return folder


class Numbers(html.parser.HTMLParser):
  """(key, value, text) of each <data> element, and the tags that are still open."""

  VOID = ('meta', 'link', 'img', 'br')

  def __init__(self, text):
    super().__init__()
    self.found, self.open, self.key = [], [], None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    if tag not in self.VOID:
      self.open.append(tag)
    if tag == 'data':
      attrs = dict(attrs)
      self.key = (attrs['data-key'], attrs['value'])

  def handle_endtag(self, tag):
    assert self.open.pop() == tag
    self.key = None

  def handle_data(self, text):
    if self.key:
      self.found.append((*self.key, text))


SCRIPT = re.compile(r'<script type="application/json" id="charts">(.*?)</script>', re.DOTALL)


@pytest.fixture
def no_files_of_figures(monkeypatch):
  """For tests of a page's text: drawing the files of its figures takes seconds."""
  monkeypatch.setattr(figures, 'save', lambda figure, path: path.parent.mkdir(parents=True, exist_ok=True))


def lookup(tree, key):
  for part in key.split('.'):
    tree = tree[int(part)] if isinstance(tree, list) else tree[part]
  return tree


def shown_equals(text, value):
  """The text is the value, rounded at its last digit."""
  text = text.replace(',', '')
  digits = len(text.partition('.')[2])
  return abs(float(text) - value) <= 0.5 * 10**-digits + 1e-12


def test_every_number_on_the_page_is_in_the_evaluation(runs):
  evaluation = json.loads((runs / 'seed0' / 'evaluation.json').read_text())
  page = Numbers((runs / 'seed0' / 'report.html').read_text())
  assert page.open == []
  for key, value, text in page.found:
    assert float(value) == lookup(evaluation, key), key
    assert shown_equals(text, float(value)), key
  keys = {key for key, _, _ in page.found}
  measured = {f'measures.{space}.{name}' for space, found in evaluation['measures'].items() for name in found}
  assert {'knn1', 'knn5', 'linear', 'images.train'} | measured <= keys


def test_the_markdown_has_the_same_numbers(runs):
  text = (runs / 'seed0' / 'report.md').read_text()
  for _, _, shown in Numbers((runs / 'seed0' / 'report.html').read_text()).found:
    assert f'| {shown} |' in text
  for link in re.findall(r'!\[[^]]*\]\(([^)]*)\)', text):
    assert (runs / 'seed0' / link).stat().st_size > 500


def without_scripts(text):
  """A page without the library of its charts, and the number of scripts."""
  return re.subn(
    r'<script( type="application/json" id="charts")?>.*?</script>', r'<script\1></script>', text, flags=re.DOTALL
  )


def test_the_page_is_self_contained(runs):
  text, scripts = without_scripts((runs / 'seed0' / 'report.html').read_text())
  assert '://' not in text
  assert scripts == text.count('<script') == 3, 'the library, the curves, and what draws them, all in the page'
  assert "default-src 'none'" in text, 'a browser refuses to load anything'
  for reference in re.findall(r'(?:src|href)="([^"]*)"', text):
    assert reference.startswith(('data:', '#'))
  ids = re.findall(r'\bid="([^"]*)"', text)
  assert len(ids) == len(set(ids))
  assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= set(ids)
  assert figures.INK not in text, 'the text of figures has the text color of the page'
  assert 'prefers-color-scheme: dark' in text


def test_the_same_files_give_the_same_page(runs):
  first = (runs / 'seed0' / 'report.html').read_text()
  report.report(runs / 'seed0')
  assert (runs / 'seed0' / 'report.html').read_text() == first


EXPECTED = ['loss', 'learning_rate', 'temperature', 'positive_similarity', 'accuracy', 'similarities', 'penalties']
CHARTS = EXPECTED[:5]
EXPECTED += ['separation', 'uniformity_tolerance', 'map', 'neighbors', 'classes', 'confusion']


def test_every_figure_is_on_the_page_and_a_file(runs):
  page = (runs / 'seed0' / 'report.html').read_text()
  assert re.findall(r'<figure id="(\w+)"', page) == EXPECTED
  for name in EXPECTED:
    assert (runs / 'seed0' / 'figures' / f'{name}.png').read_bytes().startswith(b'\x89PNG')
    assert name == 'neighbors' or (runs / 'seed0' / 'figures' / f'{name}.svg').read_text().startswith('<?xml')


# A window of Chromium is at least 500 pixels wide; a frame in it is as narrow as a phone.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe style="border:0" width="{width}" height="900" srcdoc="{page}"></iframe><script>
const canvases = root => [...root.querySelectorAll('*')].flatMap(
  x => [...x.tagName == 'CANVAS' ? [x] : [], ...x.shadowRoot ? canvases(x.shadowRoot) : []]);
const soon = () => new Promise(done => setTimeout(done, 200));  // curves are linked asynchronously
const look = async () => {{
  const page = frames[0].document, charts = [...page.querySelectorAll('.chart')];
  if (charts.some(chart => !canvases(chart).some(canvas => canvas.width > 50))) return setTimeout(look, 50);
  const found = {{
    width: page.documentElement.scrollWidth,
    charts: charts.map(chart => chart.id.replace('chart-', '')),
    figures: [...page.querySelectorAll('figure')].map(figure => {{
      const box = figure.querySelector('svg, img, .chart').getBoundingClientRect();
      return [figure.id, box.width, box.height];
    }})
  }};
  // Hides the first curve of the first chart, as its legend does, and looks which renderers are hidden.
  const plots = frames[0].Bokeh.documents[0].roots();
  const first = plots[0].renderers[0];
  first.visible = false;
  await soon();
  found.hidden = plots.map(plot => plot.renderers.filter(x => !x.visible).map(x => x.name));
  first.visible = true;
  await soon();
  found.shown = plots.every(plot => plot.renderers.every(x => x.visible));
  plots[0].x_range.end /= 2;
  found.zoomed = plots.every(plot => plot.x_range.end == plots[0].x_range.end);
  document.title = JSON.stringify(found);
}};
onload = look;</script>"""


def chromium(page: pathlib.Path, *flags):
  """(stdout, lines of the console) of a page opened in headless Chromium."""
  flags = (f'--user-data-dir={page.parent / "profile"}', '--virtual-time-budget=20000', *flags)
  done = subprocess.run(
    [CHROMIUM, *FLAGS, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
  )
  return done.stdout, [line for line in done.stderr.splitlines() if 'CONSOLE' in line]


def displayed(page, width, folder):
  """What a browser finds on a page of some width, without a console message. Leaves frame.html in the folder."""
  frame = folder / 'frame.html'
  frame.write_text(FRAME.format(width=width, page=html.escape(page.read_text())))
  dom, console = chromium(frame, '--dump-dom')
  assert console == []
  found = json.loads(html.unescape(re.search(r'<title>(.*?)</title>', dom)[1]))
  assert found['width'] == width, 'nothing is wider than the screen'
  assert found['zoomed'] and found['shown']
  assert all(min(w, h) > 50 for _, w, h in found['figures'])
  assert all(w > 300 for name, w, _ in found['figures'] if name in found['charts']), 'charts can be read'
  return found


@needs_browser
@pytest.mark.parametrize('width', [400, 1280])
def test_a_browser_displays_the_page_without_an_error(runs, width, tmp_path):
  found = displayed(runs / 'seed0' / 'report.html', width, tmp_path)
  assert [name for name, _, _ in found['figures']] == EXPECTED
  assert found['charts'] == CHARTS
  chromium(tmp_path / 'frame.html', f'--screenshot={tmp_path / "shot.png"}')
  pixels = np.asarray(Image.open(tmp_path / 'shot.png').convert('RGB')).reshape(-1, 3)
  blue = [int(figures.COLORS[0][i : i + 2], 16) for i in (1, 3, 5)]
  assert (np.abs(pixels.astype(int) - np.array(blue)[None]).max(axis=1) < 8).sum() > 100, 'the first curve is drawn'


@needs_browser
@pytest.mark.parametrize('width', [400, 1280])
def test_a_browser_compares_runs_that_can_be_switched_off(runs, width, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', tau_min=0.3)
  found = displayed(compare.compare([runs / 'seed0', other], tmp_path / 'out'), width, tmp_path)
  assert found['charts'] == ['knn1_epochs', 'knn5_epochs', 'losses']
  assert found['hidden'] == [['tau_min = 0.2 (seed0)']] * 3, 'a run that is hidden in one chart is hidden in all'


@needs_browser
def test_a_long_name_fits_on_a_phone(runs, tmp_path):
  other = shutil.copytree(runs / 'seed0', tmp_path / 'other')
  config = json.loads((other / 'config.json').read_text())
  config['data']['name'] = 60 * 'x'
  (other / 'config.json').write_text(json.dumps(config))
  displayed(report.report(other), 400, tmp_path)


@needs_browser
def test_a_console_error_would_be_noticed(tmp_path):
  (tmp_path / 'page.html').write_text('<script>console.error("broken")</script>')
  assert 'broken' in chromium(tmp_path / 'page.html', '--dump-dom')[1][0]


def test_compare_shows_mean_and_spread_over_seeds(runs, tmp_path):
  page = compare.compare([runs / 'seed0', runs / 'seed1'], tmp_path / 'out')
  evaluations = [json.loads((runs / f'seed{seed}' / 'evaluation.json').read_text()) for seed in (0, 1)]
  found = Numbers(page.read_text()).found
  assert 'measures.projector.uniformity' in {key for key, _, _ in found}
  for key, value, text in found:
    a, b = (lookup(evaluation, key) for evaluation in evaluations)
    assert float(value) == pytest.approx((a + b) / 2, rel=1e-12)
    mean, spread = text.split(' ± ')
    assert shown_equals(mean, float(value))
    assert shown_equals(spread, abs(a - b) / np.sqrt(2))
  assert '2 runs of 1 config.' in page.read_text()


def changed(run, other, k=None, **temperature):
  """A copy of a run with another temperature, and with results for other k."""
  shutil.copytree(run, other)
  config = json.loads((other / 'config.json').read_text())
  config['temperature'] |= temperature
  evaluation = json.loads((other / 'evaluation.json').read_text())
  if k:
    config['eval']['k'] = evaluation['settings']['eval.k'] = [k, 5]
    evaluation[f'knn{k}'] = evaluation.pop('knn1')
    rows = (other / 'metrics.jsonl').read_text()
    (other / 'metrics.jsonl').write_text(rows.replace('"knn1"', f'"knn{k}"'))
  (other / 'evaluation.json').write_text(json.dumps(evaluation))
  (other / 'config.json').write_text(json.dumps(config))
  return other


def test_compare_names_folders_and_the_keys_that_differ(runs, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', tau_min=0.3)
  page = compare.compare([runs / 'seed0', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert '| tau_min = 0.2 (seed0) | 0 |' in text
  assert '| tau_min = 0.3 (other) | 1 |' in text
  assert '| temperature.tau_min | 0.2 | 0.3 |' in text
  assert 'tau_min = 0.3 (other)' in (tmp_path / 'out' / 'figures' / 'losses.svg').read_text()
  assert '±' not in ''.join(shown for _, _, shown in Numbers(page.read_text()).found), 'one seed has no spread'


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_distinguishes_protocols_and_refuses_duplicates(runs, tmp_path):
  other = tmp_path / 'other'
  shutil.copytree(runs / 'seed1', other)
  with pytest.raises(ValueError, match=r'are the same run \(seed 1\): give one'):
    compare.compare([runs / 'seed1', other], tmp_path / 'out')
  other = shutil.copytree(runs / 'seed0', tmp_path / 'evaluated_again')
  chosen = restore(json.loads((other / 'config.json').read_text()), base.get_config(), ['eval.vote=majority'])
  evaluate.evaluate(chosen, other)
  compare.compare([runs / 'seed1', other], tmp_path / 'out')
  assert '| eval.vote = majority (evaluated_again) | 0 |' in (tmp_path / 'out' / 'compare.md').read_text()


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_distinguishes_files_of_images_but_not_their_folders(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  config = json.loads((other / 'config.json').read_text())
  for path, groups in (('/elsewhere/data.npz', '1 config.'), ('/elsewhere/data2.npz', '2 configs.')):
    config['data']['path'] = path
    (other / 'config.json').write_text(json.dumps(config))
    compare.compare([runs / 'seed0', other], tmp_path / 'out')
    assert f'2 runs of {groups}' in (tmp_path / 'out' / 'compare.md').read_text()


@pytest.mark.usefixtures('no_files_of_figures')
@pytest.mark.parametrize('further', [{}, {'stored_size': 20}])  # their size does not explain it
def test_runs_on_other_images_in_a_file_of_the_same_name_are_not_comparable(runs, tmp_path, further):
  other = shutil.copytree(runs / 'seed0', tmp_path / 'other')
  config = json.loads((other / 'config.json').read_text())
  (other / 'config.json').write_text(json.dumps(config | {'data': config['data'] | further}))
  (identity,) = other.glob('checkpoints/*/config/metadata')
  found = json.loads(identity.read_text())
  found['data']['contents'] = '00000000'
  identity.write_text(json.dumps(found))
  (other / 'checkpoints' / identity.parent.parent.name / 'checksums.json').unlink(missing_ok=True)
  compare.compare([runs / 'seed0', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert '2 runs of 2 configs' in text and 'The accuracies are not comparable: data.contents differs.' in text
  damages = (lambda: identity.write_text('{'), lambda: identity.write_text('[]'), identity.unlink)
  for damage in damages if not further else ():
    damage()
    with pytest.raises(ValueError, match=r'are the same run \(seed 0\): give one'):
      compare.compare([runs / 'seed0', other], tmp_path / 'out')


@pytest.mark.usefixtures('no_files_of_figures')
@pytest.mark.parametrize('further', [{}, {'train_split': 'extra'}])  # a split for training does not explain it
def test_runs_tested_on_other_images_under_the_same_name_are_not_comparable(runs, tmp_path, further):
  other = shutil.copytree(runs / 'seed0', tmp_path / 'other')
  compared = lambda: compare.compare([runs / 'seed0', other], tmp_path / 'out').with_suffix('.md').read_text()
  found, config = (json.loads((other / name).read_text()) for name in ('evaluation.json', 'config.json'))
  found['data']['contents'] = '00000000'
  config['data'] |= further
  for name, content in {'evaluation.json': found, 'config.json': config}.items():
    (other / name).write_text(json.dumps(content))
  assert 'The accuracies are not comparable: eval.data.contents differs.' in compared()
  del found['data']['contents']  # written by an older version
  (other / 'evaluation.json').write_text(json.dumps(found))
  if further:
    assert 'not comparable: eval.data' not in compared()
  else:
    with pytest.raises(ValueError, match=r'are the same run \(seed 0\): give one'):
      compared()


@pytest.mark.usefixtures('no_files_of_figures')
def test_an_evaluation_older_than_the_last_step_is_marked(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  step = json.loads((other / 'evaluation.json').read_text())['step']
  with (other / 'metrics.jsonl').open('a') as rows:
    rows.write(json.dumps({'step': step + 7, 'epoch': 9.0, 'loss': 1.0}) + '\n')
  report.report(other)
  note = f'evaluated at step {step} (epoch {{}}), then trained to step {step + 7}'
  assert re.search(re.escape(note).replace(re.escape('{}'), '.*'), (other / 'report.md').read_text())
  compare.compare([runs / 'seed0', other], tmp_path / 'out')
  note = f'{other} was evaluated at step {step}, then trained to step {step + 7}'
  assert note in (tmp_path / 'out' / 'compare.md').read_text()


@pytest.mark.usefixtures('no_files_of_figures')
def test_numbers_of_an_unfinished_run_are_shown_with_their_step(runs, tmp_path):
  chosen = json.loads((runs / 'seed0' / 'config.json').read_text())
  rows = [{'step': 0, 'knn5': 20.0, 'knn5_pixels': 30.0}, {'step': 2, 'epoch': 1.0, 'loss': 1.0}]
  notes = {
    0: 'Measured before the training. For all evaluations: python main.py',
    2: 'Measured at step 2 of the training. Before training: knn5 20.00 %, knn5_pixels 30.00 %. For all evaluations:',
  }
  for step, note in notes.items():
    other = tmp_path / f'{step}'
    other.mkdir()
    (other / 'config.json').write_text(json.dumps(chosen | {'seed': 1}))
    more = [{'step': 2, 'knn5': 50.0}] * (step > 0)
    (other / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in (*rows, *more)))
    report.report(other)
    assert note in (other / 'report.md').read_text()
    compare.compare([runs / 'seed0', other], other)
    assert f'{other} is not finished: its accuracies are those of step {step}.' in (other / 'compare.md').read_text()


@pytest.mark.usefixtures('no_files_of_figures')
def test_features_without_a_config_do_not_make_every_key_differ(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  (other / 'config.json').unlink()
  compare.compare([runs / 'seed0', runs / 'seed1', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert '| seed0, … 2 seeds | 0, 1 |' in text and '| other | – |' in text


def evaluated(**accuracies):
  return types.SimpleNamespace(accuracies=accuracies, rows=[], evaluation={}, config={'seed': 0})


def test_the_figure_of_a_comparison_shows_what_most_runs_have():
  runs = {'a': [evaluated(linear=1.0, knn5=2.0)], 'b': [evaluated(knn5=3.0)], 'c': [evaluated(knn5=4.0)]}
  section = compare._accuracy(runs)
  assert section.parts[1].caption == 'knn5.'


def test_a_comparison_averages_only_what_all_seeds_of_a_config_have():
  section = compare._accuracy({'a': [evaluated(linear=1.0, knn5=2.0), evaluated(knn5=4.0)]})
  table = section.parts[0]
  row = dict(zip(table.head, table.rows[0], strict=True))
  assert row['linear, %'] == '–' and row['knn5, %'].value == 3


@pytest.mark.usefixtures('no_files_of_figures')
def test_a_run_that_is_evaluated_on_another_set(runs, tmp_path):
  """Its evaluation is in evaluation_NAME.json."""
  place = shutil.copytree(runs / 'seed0', tmp_path / 'run')
  config = json.loads((place / 'config.json').read_text())
  config['eval']['data']['name'] = 'cifar100'
  (place / 'config.json').write_text(json.dumps(config))
  for suffix in ('json', 'npz'):
    (place / f'evaluation.{suffix}').rename(place / f'evaluation_cifar100.{suffix}')
  text = report.report(place).with_suffix('.md').read_text()
  assert 'evaluated on cifar100 at step' in text and 'Not evaluated yet' not in text


def test_means_over_other_sets_are_left_out():
  runs = {'a': [evaluated(spearman_mean=60.0, spearman_sts12=50.0, spearman_stsb=70.0)]}
  runs['b'] = [evaluated(spearman_mean=69.0, spearman_stsb=69.0)]
  section = compare._accuracy(runs)
  table = section.parts[0]
  assert [name for name in table.head if 'mean' in name] == []
  assert table.rows[0][2].best and not table.rows[1][2].best
  assert 'spearman_mean is left out, because the runs were evaluated on different sets.' in section.text
  runs['b'] = [evaluated(spearman_mean=69.5, spearman_sts12=70.0, spearman_stsb=69.0)]
  section = compare._accuracy(runs)
  assert any('mean' in name for name in section.parts[0].head) and 'left out' not in section.text


@pytest.mark.parametrize(
  ('key', 'setting'),
  [
    ('finetune', 'eval.finetune'),
    ('finetune', 'eval.class_weights'),
    ('zero_shot', 'eval.prompts'),
    ('image_to_text_1', 'eval.retrieval'),
  ],
)
def test_results_of_other_protocols_are_not_comparable(key, setting):
  runs = {'a': [evaluated(knn5=1.0, **{key: 95.0})], 'b': [evaluated(knn5=2.0, **{key: 60.0})]}
  section = compare._accuracy(runs, [setting])
  knn, other = (section.parts[0].rows[place][column] for place, column in ((1, 2), (0, 3)))
  assert knn.best and not other.best and f'is not comparable: {setting} differs.' in section.text
  section = compare._accuracy(runs)
  assert section.parts[0].rows[0][3].best and 'not comparable' not in section.text


def test_later_keys_old_names_and_paths_do_not_distinguish_runs(tmp_path):
  def finished(seed, path, older=False):
    chosen = base.get_config()
    chosen.seed, chosen.eval.data.path, chosen.eval.linear = seed, path, 'balanced_cifar'
    saved, summary, evaluation = chosen.to_dict(), {'online_probe': 50.0}, {'settings': {}, 'knn5': 60.0}
    if older:
      saved['eval']['linear'] = 'supervised_cifar'
      saved['probe'] = saved.pop('online_probe')
      del saved['init'], saved['data']['stored_size'], saved['eval']['data']
      summary, evaluation['settings'] = {'probe': 50.0}, {'eval.linear': 'supervised_cifar'}
    folder = tmp_path / str(seed)
    folder.mkdir()
    for name, contents in (('config', saved), ('summary', summary), ('evaluation', evaluation)):
      (folder / f'{name}.json').write_text(json.dumps(contents))
    return report.FinishedRun.read(folder)

  runs = [finished(0, '/here'), finished(1, '/there'), finished(2, '', older=True)]
  assert len(compare._groups(runs)) == 1
  assert all(run.accuracies == {'online_probe': 50.0, 'knn5': 60.0} for run in runs)


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_shows_what_only_some_runs_have(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  evaluation = json.loads((other / 'evaluation.json').read_text())
  lost = evaluation.pop('linear')
  evaluation['knn7'] = 12.25
  del evaluation['measures']['projector'], evaluation['measures']['backbone']['rankme']
  (other / 'evaluation.json').write_text(json.dumps(evaluation))
  changed = json.loads((other / 'config.json').read_text())
  changed['batch_size'] += 1
  (other / 'config.json').write_text(json.dumps(changed))
  compare.compare([runs / 'seed1', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  head = next(line for line in text.splitlines() if 'seeds' in line).split(' | ')
  first, second = (
    re.search(rf'^\| batch_size = \d+ \({name}\) \|.*$', text, re.MULTILINE)[0].rstrip(' |').split(' | ')
    for name in ('seed1', 'other')
  )
  head = [name.rstrip(' |') for name in head]
  assert (first[head.index('linear, %')], second[head.index('linear, %')]) == (f'{lost:.2f}', '–')
  assert (first[head.index('knn7, %')], second[head.index('knn7, %')]) == ('–', '12.25')
  assert head[2:4] == ['knn1, %', 'knn5, %'], 'what all runs have comes first'
  assert 'Not all runs have linear, knn7. To add it: python main.py --mode=evaluate' in text
  assert 'Measures of the projector features' in text and re.search(r'RankMe.*\| –', text)


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_marks_the_best(runs, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', tau_min=0.3)  # its numbers are larger by 0.25
  page = compare.compare([runs / 'seed0', other], tmp_path / 'out').read_text()
  text = (tmp_path / 'out' / 'compare.md').read_text()
  best = json.loads((other / 'evaluation.json').read_text())['knn5']
  assert f'**{best:.2f}** ★' in re.search(r'^\| tau_min = 0.3.*$', text, re.MULTILINE)[0]
  assert '★' not in re.search(r'^\| tau_min = 0.2.*$', text, re.MULTILINE)[0]
  assert page.count('class="n best"') == text.count('** ★') > 1
  assert 'With one seed, a small difference may be chance.' in text


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_says_what_is_not_comparable(runs, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', tau_min=0.3)
  compare.compare([runs / 'seed0', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert 'The losses are not comparable: temperature.tau_min differs, which changes the loss itself.' in text
  config = json.loads((other / 'config.json').read_text())
  config['temperature']['tau_min'], config['data']['path'] = 0.2, '/elsewhere/data2.npz'
  (other / 'config.json').write_text(json.dumps(config))
  compare.compare([runs / 'seed0', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert 'The losses' not in text
  assert 'The accuracies are not comparable: data.file differs.' in text and '★' not in text


@pytest.mark.usefixtures('no_files_of_figures')
@pytest.mark.parametrize(
  ('key', 'here', 'there'),
  [
    ('held_out', {'held_out': 0.1}, {'held_out': 0.2}),
    ('file', {'source': 'tar', 'path': '/data/a.tar'}, {'source': 'tar', 'path': '/data/b.tar'}),
  ],
)
def test_other_test_images_are_not_comparable(runs, tmp_path, key, here, there):
  for name, data in (('here', here), ('there', there)):
    place = shutil.copytree(runs / 'seed0', tmp_path / name)
    config = json.loads((place / 'config.json').read_text())
    config['data'] |= data
    (place / 'config.json').write_text(json.dumps(config))
  compare.compare([tmp_path / 'here', tmp_path / 'there'], tmp_path / 'out')
  assert f'The accuracies are not comparable: data.{key} differs.' in (tmp_path / 'out' / 'compare.md').read_text()


def test_names_of_measured_layers_stay_in_the_folder_and_out_of_the_markup(runs, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', tau_min=0.3)
  evaluation = json.loads((other / 'evaluation.json').read_text())
  evaluation['measures'] = {'"><b id=x>/../../../outside': evaluation['measures']['backbone']}
  (other / 'evaluation.json').write_text(json.dumps(evaluation))
  page = compare.compare([runs / 'seed0', other], tmp_path / 'deep' / 'out').read_text()
  assert '<b id=x>' not in page and 'id="uniformity_tolerance_-b-id-x-outside"' in page
  assert (tmp_path / 'deep' / 'out' / 'figures' / 'uniformity_tolerance_-b-id-x-outside.svg').exists()
  assert not list(tmp_path.rglob('outside.svg'))


@pytest.mark.usefixtures('no_files_of_figures')
def test_compare_of_other_k_shows_what_both_have(runs, tmp_path):
  other = changed(runs / 'seed1', tmp_path / 'other', k=7, tau_min=0.3)
  page = compare.compare([runs / 'seed0', other], tmp_path / 'out').read_text()
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert '| tau_min = 0.3 (other) | 1 |' in text, 'k does not make another config'
  assert re.findall(r'<figure id="(\w+)"', page)[:3] == ['accuracy', 'knn5_epochs', 'losses']
  assert 'knn5.' in text and 'Not all runs have knn1, knn7.' in text and '"--config.eval.k=(1,5,7)"' in text
  again = changed(runs / 'seed0', tmp_path / 'again', k=7)  # the same run with another k
  compare.compare([runs / 'seed0', again], tmp_path / 'out')
  assert '| eval.k = [7, 5] (again) | 0 |' in (tmp_path / 'out' / 'compare.md').read_text()


@pytest.mark.usefixtures('no_files_of_figures')
def test_equal_folder_names_are_told_apart_by_their_parents(runs, tmp_path):
  other = changed(runs / 'seed0', tmp_path / 'elsewhere' / 'seed0', tau_min=0.3)
  compare.compare([runs / 'seed0', other], tmp_path / 'out')
  assert '(elsewhere/seed0)' in (tmp_path / 'out' / 'compare.md').read_text()


def test_a_long_label_falls_back_to_the_folder(tmp_path):
  def run(name, **changes):
    config = base.get_config().to_dict()
    config['optimizer'] |= changes
    return report.FinishedRun(tmp_path / name, config, {}, {}, {}, [])

  changes = dict(learning_rate=1.0, weight_decay=1.0, momentum=0.5, warmup_epochs=3.0)
  assert list(compare._groups([run('a'), run('b', **changes)])) == ['a', 'b']
  changes.pop('momentum')
  assert list(compare._groups([run('a'), run('b', **changes)]))[1] == (
    'learning_rate = 1.0, warmup_epochs = 3.0, weight_decay = 1.0 (b)'
  )


def test_the_command_compares_the_given_workdirs(runs, tmp_path):
  root = pathlib.Path(report.__file__).parents[2]
  command = [
    sys.executable,
    root / 'main.py',
    '--mode=compare',
    f'--workdir={tmp_path}',
    runs / 'seed0',
    runs / 'seed1',
  ]
  subprocess.run(command, check=True, timeout=120)
  assert '2 runs of 1 config.' in (tmp_path / 'compare.md').read_text()
  done = subprocess.run([*command, '--unknown'], check=False, timeout=120, capture_output=True, text=True)
  assert done.returncode == 1
  assert "'--unknown' is not a flag" in done.stderr


def test_a_run_that_was_not_evaluated_still_has_a_page(runs, tmp_path):
  for name in ('config.json', 'metrics.jsonl', 'summary.json', 'neighbors.png'):
    shutil.copy(runs / 'seed0' / name, tmp_path / name)
  text = report.report(tmp_path).read_text()
  assert f'For all evaluations: python main.py --mode=evaluate --workdir={tmp_path}' in text
  assert re.findall(r'<figure id="(\w+)"', text) == [*CHARTS, 'neighbors']
  assert (tmp_path / 'figures' / 'neighbors.png').read_bytes().startswith(b'\x89PNG')
  (tmp_path / 'summary.json').unlink()  # an interrupted run: the latest numbers of the log
  last = [row['knn5'] for row in metric_log.read(tmp_path) if 'knn5' in row][-1]
  report.report(tmp_path)
  text = (tmp_path / 'report.md').read_text()
  assert 'Training is not finished: the last logged step is 4.' in text
  assert f'| kNN, k = 5, % | {last:.2f} |' in text


def test_the_page_begins_with_device_time_commit_and_date(runs):
  summary = json.loads((runs / 'seed0' / 'summary.json').read_text())
  line = (runs / 'seed0' / 'report.md').read_text().split('\n\n')[2]
  assert re.fullmatch(r'Trained in \d+ s on 1 x cpu; finished on \d{4}-\d\d-\d\d \d\d:\d\d UTC; .*jax [\d.]+\.', line)
  assert not summary['commit'] or f'commit {summary["commit"]};' in line
  older = report.FinishedRun(pathlib.Path(), {}, {'seconds': 7300.0, 'device': '1 x cpu'}, {}, {}, [])
  assert report._lead(older) == 'Trained in 2 h 1 min on 1 x cpu.'


def test_the_commit_is_that_of_this_checkout(tmp_path):
  assert metric_log.commit(tmp_path) is None
  git = ['git', '-C', tmp_path, '-c', 'user.name=a', '-c', 'user.email=a@b.c']
  (tmp_path / 'file').write_text('1')
  (tmp_path / 'inside').mkdir()
  for arguments in (['init', '-q'], ['add', '.'], ['commit', '-qm', 'first']):
    subprocess.run([*git, *arguments], check=True)
  found = metric_log.commit(tmp_path)
  assert re.fullmatch(r'[0-9a-f]{12}', found)
  assert metric_log.commit(tmp_path / 'inside') is None, 'a package inside of another checkout is not of it'
  (tmp_path / 'file').write_text('2')
  assert metric_log.commit(tmp_path) == f'{found}-dirty'


def test_the_report_of_sentences_shows_their_neighbors(tmp_path):
  (tmp_path / 'summary.json').write_text('{"spearman_mean": 50.0}')
  (tmp_path / 'neighbors.txt').write_text('A <b> & c.\n  0.91  Another.\n')
  page = report.report(tmp_path).read_text()
  assert '<pre>A &lt;b&gt; &amp; c.\n  0.91  Another.</pre>' in page
  assert '```text\nA <b> & c.\n  0.91  Another.\n```' in (tmp_path / 'report.md').read_text()


def test_the_report_of_sentences_has_their_accuracies_and_numbers(tmp_path):
  evaluation = {
    'features': 'backbone',
    'transfer_mean': 81.5,
    'transfer_mr': 81.5,
    'sentences': {'train': 9, 'test': 4},
  }
  (tmp_path / 'evaluation.json').write_text(json.dumps(evaluation))
  found = {key: value for key, value, _ in Numbers(report.report(tmp_path).read_text()).found}
  assert found == {'transfer_mean': '81.5', 'transfer_mr': '81.5', 'sentences.train': '9', 'sentences.test': '4'}


@pytest.mark.parametrize('counts', [{}, {'train': [9, 8]}])
def test_numbers_of_training_images_are_shown_if_there_are_any(counts):
  table = {'names': ['cat', 'dog'], 'test': [3, 4], 'zero_shot': [50.0, 75.0], 'zero_shot_mistaken_for': ['dog', None]}
  run = report.FinishedRun(pathlib.Path(), {}, {}, {'classes': {**table, **counts}}, {}, [])
  (section,) = report._classes(run)
  assert ('training images' in section.parts[0].head) == bool(counts)
  assert {len(row) for row in section.parts[0].rows} == {len(section.parts[0].head)}


def test_many_classes_have_a_table_of_confusions():
  count = figures.MOST_CELLS + 1
  matrix = 10 * np.eye(count, dtype=int)
  matrix[3, 5], matrix[7, 2] = 4, 9
  classes = {'classes': {'names': [f'class {c}' for c in range(count)]}}
  run = report.FinishedRun(pathlib.Path(), {}, {}, classes, {'confusion_linear': matrix}, [])
  (table,) = report._confusions(run, 'linear')
  assert table.rows == [['class 7', 'class 2', '9', '19'], ['class 3', 'class 5', '4', '14']]


def test_the_map_gives_each_of_ten_classes_its_own_color():
  drawn = figures.plane(np.eye(10)[:, :2], np.arange(10), np.ones(2), [f'class {c}' for c in range(10)])
  assert len({tuple(points.get_facecolor()[0]) for points in drawn.axes[0].collections}) == 10


def test_a_page_speaks_of_names_below_charts_only_if_there_are_any(tmp_path):
  for label in ('', 'knn5'):
    drawn = figures.Chart('loss', [figures.Curve(label, [(0, 1.0), (1, 0.5)])])
    section = page.Section('Training', '', [page.Figure('loss', 'Loss.', drawn)])
    text = page.write(tmp_path, 'report', 'title', '', [section]).read_text()
    assert ('click on a name below a chart' in text) == bool(label)


def test_the_heat_map_shows_shares_of_each_class():
  drawn = figures.svg(figures.confusion(np.array([[3, 1], [0, 2]]), ['cat', 'dog']))
  assert all(f'>{text}</text>' in drawn for text in ('75', '25', '100', 'cat', 'dog', 'predicted'))


def test_a_long_run_with_large_images_fits_into_three_megabytes(runs, tmp_path):
  shutil.copy(runs / 'seed0' / 'config.json', tmp_path / 'config.json')
  rows = [
    {'step': i, 'epoch': i / 100, 'loss': 1 / i, 'temperature': 0.1, 'learning_rate': 0.1} for i in range(1, 20_001)
  ]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  noise = np.random.default_rng(0).integers(0, 256, (2280, 2508, 3), np.uint8)  # 10 x 11 images of 224 pixels
  Image.fromarray(noise).save(tmp_path / 'neighbors.png')
  page = report.report(tmp_path)
  assert page.stat().st_size < 3e6
  assert f'The {charts.MOST_POINTS} points of a longer curve are means' in page.read_text()


def test_large_images_are_reduced(runs):
  images = np.zeros((2, 3, 224, 224, 3), np.uint8)
  assert figures.width(figures.neighbors(images, np.zeros((2, 3), int))) < 3 * 130


def test_the_online_probe_is_shown_with_the_evaluation_but_thirds_are_not():
  evaluation = {'knn5': 80.0, 'knn5_head': 90.0, 'knn5_middle': 80.0, 'knn5_tail': 70.0, 'linear_std': 0.1}
  found = report.FinishedRun(pathlib.Path(), {}, {'knn5': 79.0, 'online_probe': 60.0}, evaluation, {}, [])
  assert found.accuracies == {'online_probe': 60.0, 'knn5': 80.0}


def test_nothing_to_report_is_refused_in_one_line(tmp_path):
  with pytest.raises(ValueError, match='has nothing to report: train or evaluate there first'):
    report.report(tmp_path)
  with pytest.raises(ValueError, match='at least two workdirs'):
    compare.compare([tmp_path], tmp_path)


def test_a_missing_matplotlib_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ValueError, match=r"matplotlib, .*pip install -e '\.\[plots\]'"):
    figures.separation(np.ones(3), np.ones(3))


def test_a_missing_bokeh_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'bokeh.document', None)
  with pytest.raises(ValueError, match=r"bokeh, .*pip install -e '\.\[plots\]'"):
    charts.embed({'loss': figures.Chart('loss', [figures.Curve('', [(0, 1)])])})


def test_a_label_cannot_end_the_script():
  text = charts.embed({'loss': figures.Chart('loss', [figures.Curve('<!--<script><b>p1001', [(0, 1)])])})
  assert text.count('</script>') == 3 and '<!--' not in SCRIPT.search(text)[1] and '\\u003cb>p1001' in text
