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
from ssl_jax.reporting import figures, report
from tests.helpers import needs_browser, tiny

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


def test_the_page_is_self_contained(runs):
  text = (runs / 'seed0' / 'report.html').read_text()
  assert '://' not in text
  assert '<script' not in text
  for reference in re.findall(r'(?:src|href)="([^"]*)"', text):
    assert reference.startswith(('data:', '#'))
  ids = re.findall(r'\bid="([^"]*)"', text)
  assert len(ids) == len(set(ids))
  assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= set(ids)
  assert figures.INK not in text, 'the text of figures has the text colour of the page'
  assert 'prefers-color-scheme: dark' in text


def test_the_same_files_give_the_same_page(runs):
  first = (runs / 'seed0' / 'report.html').read_text()
  report.report(runs / 'seed0')
  assert (runs / 'seed0' / 'report.html').read_text() == first


EXPECTED = ['loss', 'learning_rate', 'temperature', 'positive_similarity', 'accuracy', 'similarities', 'penalties']
EXPECTED += ['separation', 'uniformity_tolerance', 'map', 'neighbours', 'classes']


def test_every_figure_is_on_the_page_and_a_file(runs):
  page = (runs / 'seed0' / 'report.html').read_text()
  assert re.findall(r'<figure id="(\w+)"', page) == EXPECTED
  for name in EXPECTED:
    assert (runs / 'seed0' / 'figures' / f'{name}.png').read_bytes().startswith(b'\x89PNG')
    assert name == 'neighbours' or (runs / 'seed0' / 'figures' / f'{name}.svg').read_text().startswith('<?xml')


# A window of Chromium is at least 500 pixels wide; a frame in it is as narrow as a phone.
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe style="border:0" width="{width}" height="900" srcdoc="{page}">
</iframe><script>onload = () => {{
  const page = frames[0].document;
  document.title = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    figures: [...page.querySelectorAll('figure')].map(figure => {{
      const box = figure.querySelector('svg, img').getBoundingClientRect();
      return [figure.id, box.width, box.height];
    }})
  }});
}};</script>"""


def chromium(page: pathlib.Path, *flags):
  """(stdout, lines of the console) of a page opened in headless Chromium."""
  command = [CHROMIUM, *FLAGS, f'--user-data-dir={page.parent / "profile"}', *flags, page.as_uri()]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
  return done.stdout, [line for line in done.stderr.splitlines() if 'CONSOLE' in line]


@needs_browser
@pytest.mark.parametrize('width', [400, 1280])
def test_a_browser_displays_the_page_without_an_error(runs, width, tmp_path):
  page = tmp_path / 'frame.html'
  page.write_text(FRAME.format(width=width, page=html.escape((runs / 'seed0' / 'report.html').read_text())))
  dom, console = chromium(page, '--dump-dom')
  assert console == []
  found = json.loads(re.search(r'<title>(.*?)</title>', dom)[1])
  assert found['width'] == width, 'nothing is wider than the screen'
  assert [name for name, _, _ in found['figures']] == EXPECTED
  assert all(min(w, h) > 50 for _, w, h in found['figures'])
  chromium(page, f'--screenshot={tmp_path / "shot.png"}')
  pixels = np.asarray(Image.open(tmp_path / 'shot.png').convert('RGB')).reshape(-1, 3)
  blue = [int(figures.COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)]
  assert (np.abs(pixels.astype(int) - np.array(blue)[None]).max(axis=1) < 8).sum() > 100, 'the first curve is drawn'


@needs_browser
def test_a_console_error_would_be_noticed(tmp_path):
  (tmp_path / 'page.html').write_text('<script>console.error("broken")</script>')
  assert 'broken' in chromium(tmp_path / 'page.html', '--dump-dom')[1][0]


def test_compare_shows_mean_and_spread_over_seeds(runs, tmp_path):
  page = report.compare([runs / 'seed0', runs / 'seed1'], tmp_path / 'out')
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


def test_compare_names_the_keys_that_differ(runs, tmp_path):
  other = tmp_path / 'other'
  shutil.copytree(runs / 'seed1', other)
  config = json.loads((other / 'config.json').read_text())
  config['temperature']['tau_min'] = 0.3
  (other / 'config.json').write_text(json.dumps(config))
  page = report.compare([runs / 'seed0', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert re.search(r'\| A \| 0 \|.*\| temperature.tau_min = 0.2 \|', text)
  assert re.search(r'\| B \| 1 \|.*\| temperature.tau_min = 0.3 \|', text)
  assert '±' not in ''.join(shown for _, _, shown in Numbers(page.read_text()).found), 'one seed has no spread'


def test_compare_distinguishes_protocols_and_refuses_duplicates(runs, tmp_path):
  other = tmp_path / 'other'
  shutil.copytree(runs / 'seed1', other)
  with pytest.raises(ValueError, match=r'are the same run \(seed 1\): give one'):
    report.compare([runs / 'seed1', other], tmp_path / 'out')
  other = shutil.copytree(runs / 'seed0', tmp_path / 'evaluated_again')
  chosen = restore(json.loads((other / 'config.json').read_text()), base.get_config(), ['eval.vote=majority'])
  evaluate.evaluate(chosen, other)
  report.compare([runs / 'seed1', other], tmp_path / 'out')
  assert re.search(r'\| B \| 0 \|.*\| eval.vote = majority \|', (tmp_path / 'out' / 'compare.md').read_text())


def test_compare_distinguishes_files_of_images_but_not_their_folders(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  config = json.loads((other / 'config.json').read_text())
  for path, groups in (('/elsewhere/data.npz', '1 config.'), ('/elsewhere/data2.npz', '2 configs.')):
    config['data']['path'] = path
    (other / 'config.json').write_text(json.dumps(config))
    report.compare([runs / 'seed0', other], tmp_path / 'out')
    assert f'2 runs of {groups}' in (tmp_path / 'out' / 'compare.md').read_text()


def test_an_evaluation_older_than_the_last_step_is_marked(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  step = json.loads((other / 'evaluation.json').read_text())['step']
  with (other / 'metrics.jsonl').open('a') as rows:
    rows.write(json.dumps({'step': step + 7, 'epoch': 9.0, 'loss': 1.0}) + '\n')
  report.report(other)
  note = f'evaluated at step {step} (epoch {{}}), then trained to step {step + 7}'
  assert re.search(re.escape(note).replace(re.escape('{}'), '.*'), (other / 'report.md').read_text())
  report.compare([runs / 'seed0', other], tmp_path / 'out')
  note = f'{other} was evaluated at step {step}, then trained to step {step + 7}'
  assert note in (tmp_path / 'out' / 'compare.md').read_text()


def test_features_without_a_config_do_not_make_every_key_differ(runs, tmp_path):
  other = shutil.copytree(runs / 'seed1', tmp_path / 'other')
  (other / 'config.json').unlink()
  report.compare([runs / 'seed0', runs / 'seed1', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  assert re.search(rf'\| A \| 0, 1 \|.*\| {report.FinishedRun.read(runs / "seed0").title} \|', text)


def evaluated(**accuracies):
  return types.SimpleNamespace(accuracies=accuracies, rows=[], evaluation={}, config={'seed': 0})


def test_the_figure_of_a_comparison_shows_what_most_runs_have():
  runs = {'a': [evaluated(linear=1.0, knn5=2.0)], 'b': [evaluated(knn5=3.0)], 'c': [evaluated(knn5=4.0)]}
  (section,) = report._comparison(runs)
  assert section.parts[1].caption == 'knn5.'


def test_a_comparison_averages_only_what_all_seeds_of_a_config_have():
  (section,) = report._comparison({'a': [evaluated(linear=1.0, knn5=2.0), evaluated(knn5=4.0)]})
  table = section.parts[0]
  row = dict(zip(table.head, table.rows[0], strict=True))
  assert row['linear, %'] == '–' and row['knn5, %'].value == 3


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
  assert len(report._groups(runs)) == 1
  assert all(run.accuracies == {'online_probe': 50.0, 'knn5': 60.0} for run in runs)


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
  report.compare([runs / 'seed1', other], tmp_path / 'out')
  text = (tmp_path / 'out' / 'compare.md').read_text()
  head = next(line for line in text.splitlines() if 'seeds' in line).split(' | ')
  first, second = (re.search(rf'^\| {letter} \|.*$', text, re.MULTILINE)[0].split(' | ') for letter in 'AB')
  assert (first[head.index('linear, %')], second[head.index('linear, %')]) == (f'{lost:.2f}', '–')
  assert (first[head.index('knn7, %')], second[head.index('knn7, %')]) == ('–', '12.25')
  assert 'Measures of the projector features' in text and re.search(r'RankMe.*\| –', text)


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
  for name in ('config.json', 'metrics.jsonl', 'summary.json'):
    shutil.copy(runs / 'seed0' / name, tmp_path / name)
  text = report.report(tmp_path).read_text()
  assert 'Not evaluated yet' in text
  assert '<figure id="loss"' in text


def test_the_online_probe_is_shown_with_the_evaluation_but_thirds_are_not():
  evaluation = {'knn5': 80.0, 'knn5_head': 90.0, 'knn5_middle': 80.0, 'knn5_tail': 70.0, 'linear_std': 0.1}
  found = report.FinishedRun(pathlib.Path(), {}, {'knn5': 79.0, 'online_probe': 60.0}, evaluation, {}, [])
  assert found.accuracies == {'online_probe': 60.0, 'knn5': 80.0}


def test_nothing_to_report_is_refused_in_one_line(tmp_path):
  with pytest.raises(ValueError, match='has nothing to report: train or evaluate there first'):
    report.report(tmp_path)
  with pytest.raises(ValueError, match='at least two workdirs'):
    report.compare([tmp_path], tmp_path)


def test_a_missing_matplotlib_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib', None)
  with pytest.raises(ValueError, match=r"pip install 'ssl_jax\[plots\]'"):
    figures.separation(np.ones(3), np.ones(3))
