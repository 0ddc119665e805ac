"""The documentation: its examples run, its links lead somewhere, and what is generated from the code is complete."""

import ast
import doctest
import json
import pathlib
import re
import shlex
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from ssl_jax import config, losses, methods
from ssl_jax.config import HARMLESS
from tests import test_losses
from tests.reference import contrastive as reference

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / 'docs'))
import generate  # noqa: E402

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
EXPERIMENTS = sorted((ROOT / 'experiments').glob('**/README.md'))


def blocks(name):
  return re.findall(r'```python\n(.*?)```', (ROOT / name).read_text(), re.DOTALL)


def test_the_keys_that_may_change_are_listed():
  page = (ROOT / 'docs' / 'config.md').read_text()
  assert all(f'`{key}`' in page for key in HARMLESS)


def test_the_readme_is_short_and_names_the_commands():
  text = (ROOT / 'README.md').read_text()
  assert len(text.split()) <= 800
  assert '\nmake train ' in text and '\nmake test ' in text


def test_the_example_of_the_readme_runs():
  (code,) = blocks('README.md')
  assert len([line for line in code.splitlines() if line.strip()]) <= 15
  page = {}
  exec(compile(code, 'README.md', 'exec'), page)
  np.testing.assert_allclose(page['loss'], losses.nt_xent(page['z1'], page['z2'], temperature=0.5).mean(), rtol=1e-5)


@pytest.mark.parametrize('name', ['docs/losses.md', 'docs/concepts.md'])
def test_the_examples_of_the_pages_run(name):
  z1, z2 = jax.random.normal(jax.random.key(0), (2, 8, 4))
  page = {'z1': z1, 'z2': z2, 'config': base.get_config()}
  for code in blocks(name):
    exec(compile(code, name, 'exec'), page)
  assert page['loss'].shape == ()


def test_the_loss_of_contributing_is_its_reference(monkeypatch):
  """The three blocks of the page, as they stand there: the loss, its loop and its row."""
  loss, loop, row = blocks('CONTRIBUTING.md')[:3]
  monkeypatch.delitem(losses.CONTRASTIVE, 'pairwise_logistic', raising=False)  # a reader may have added it
  before = dict(losses.CONTRASTIVE)
  written, looped = {}, {}
  try:
    exec(compile(loss, 'CONTRIBUTING.md', 'exec'), written)
    exec(compile(loop, 'CONTRIBUTING.md', 'exec'), looped)
    (name,) = losses.CONTRASTIVE.keys() - before
    monkeypatch.setattr(losses, name, written[name], raising=False)
    monkeypatch.setattr(reference, name, looped[name], raising=False)
    rows = {'losses': losses, 'reference': reference}
    exec(compile(row, 'CONTRIBUTING.md', 'exec'), rows)
    assert rows['row'].keys() == {name}
    monkeypatch.setitem(test_losses.CASES, name, rows['row'][name])
    for positives in (1, 4):
      compare(name, positives)
    run_example(written[name])
    assert losses.from_config(dict(name=name)).takes_temperature
  finally:
    losses.CONTRASTIVE.clear()
    losses.CONTRASTIVE.update(before)


@pytest.mark.slow
def test_the_code_of_contributing_has_correct_types(tmp_path):
  modules = [code for code in blocks('CONTRIBUTING.md') if 'import' in code]
  for number, code in enumerate(modules):
    (tmp_path / f'block_{number}.py').write_text(code)
  command = [sys.executable, '-m', 'mypy', '--config-file=pyproject.toml', *map(str, sorted(tmp_path.glob('*.py')))]
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr


def compare(name, positives):
  """A row of `CASES` in value and in gradient."""
  loss, loop, _ = test_losses.CASES[name]
  for tau in test_losses.TAUS:
    pos, neg, where = test_losses.similarities(7, positives)
    mean = lambda pos, neg, tau=tau, where=where: jnp.mean(loss(pos, neg, tau, where=where))
    rows = test_losses.rows(pos, neg, where)
    np.testing.assert_allclose(loss(pos, neg, tau, where=where), loop(*rows, tau), rtol=1e-4, atol=1e-5)
    gradients = np.concatenate(jax.grad(mean, argnums=(0, 1))(pos, neg), axis=1)
    entries = [(q, c) for q in range(len(pos)) for c in range(positives + 7)]
    entries = [e for e in entries if e[1] < positives or where[e[0], e[1] - positives]]
    wanted = test_losses.difference_quotient(lambda p, n, tau=tau: loop(p, n, tau), pos, neg, where, entries)
    np.testing.assert_allclose([gradients[e] for e in entries], wanted, rtol=2e-3, atol=1e-4)


def run_example(function):
  with np.printoptions(precision=4, suppress=True):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for test in finder.find(function, globs={function.__name__: function, 'jnp': jnp}, module=False):
      runner.run(test)
  assert runner.tries and not runner.failures


@pytest.mark.parametrize('page', PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
  pages = [*generate.copied_pages(), *map(generate.api_page, generate.API)]
  generated = {f'_generated/{name}' for name in pages}
  figures = {f'_generated/figures/{name}.svg' for name in ('pairs', 'penalties', 'temperatures', 'schedules')}
  for address in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
    path = address.partition('#')[0]
    if path and not re.match(r'[a-z]+:', address):
      assert path in generated | figures or (page.parent / path).exists(), address


@pytest.mark.parametrize('page', [*PAGES, *EXPERIMENTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_configs_of_commands_are_valid(page):
  text = page.read_text().replace('\\\n', ' ')
  for command in re.findall(r'^python main\.py (.*)', text, re.MULTILINE):
    given = shlex.split(command, comments=True)
    changes = [argument.removeprefix('--config.') for argument in given if argument.startswith('--config.')]
    for file in (argument.removeprefix('--config=') for argument in given if argument.startswith('--config=')):
      chosen = config.load(file, changes)
      config.validate(chosen, base.get_config())
      methods.parts(chosen)


def test_the_table_of_temperatures_has_the_means_of_the_results():
  table = generate.by_temperature().splitlines()
  header, _, *lines = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table]
  assert header[:3] == ['loss and set', 'accuracy', 'τ = 0.07'] and len(lines) == len(generate.BY_TEMPERATURE)
  results = map(json.loads, (ROOT / 'experiments/dystress/results.jsonl').read_text().splitlines())
  scores = [result['metrics']['knn200'] for result in results if result['name'] == 'simclr_0.2']
  assert len(scores) > 1
  cells = dict(zip(header, lines[0], strict=True))
  assert cells['τ = 0.2'] == f'**{statistics.mean(scores):.2f}**' and not cells['τ = 0.07']


@pytest.mark.parametrize('name', ['CONTRIBUTING.md', 'docs/architecture.md', 'docs/extending.md'])
def test_files_that_are_named_exist(name):
  named = re.findall(
    r'`((?:ssl_jax|tests|configs|experiments|benchmarks)/[\w/.]*|main\.py)`', (ROOT / name).read_text()
  )
  assert named
  assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_trace_of_a_key_has_at_most_eight_files():
  text = (ROOT / 'docs' / 'architecture.md').read_text()
  trace = re.search(r'## From `temperature.tau_min` to the logits\n(.*?)^## ', text, re.DOTALL | re.MULTILINE)[1]
  assert len(set(re.findall(r'`([\w/]+\.py)`', trace))) <= 8


def test_the_config_reference_has_every_key():
  text = generate.config_reference()
  named = set(config.NAMED)
  for key in config.flatten(base.get_config()):
    shown = key.partition('.')[0] if key.partition('.')[0] in named else key
    assert f'| `{shown}` |' in text, key
  assert '| `augment_other` |' in text


def test_every_option_of_every_config_is_documented():
  text = generate.recipes()
  sections = dict(re.findall(r'^## `configs/(\w+)\.py`\n(.*?)(?=^## |\Z)', text, re.DOTALL | re.MULTILINE))
  for name, module in generate.recipe_files().items():
    assert set(getattr(module, 'VARIANTS', {})) <= set(re.findall(r'`(\w+)`', sections[name])), name


def test_the_table_of_methods_has_every_option_of_cifar10():
  cifar10 = generate.recipe_files()['cifar10']
  page = (ROOT / 'docs' / 'methods.md').read_text()
  named = set(re.findall(r'`(\w+)`', page))
  assert set(cifar10.VARIANTS) <= named


def test_the_names_of_every_named_section_are_listed():
  text = generate.names()
  for name in losses.CONTRASTIVE:
    assert f'| `{name}` |' in text


def test_the_tutorial_is_stored_without_outputs_and_uses_keys_that_exist():
  cells = json.loads((ROOT / 'docs' / 'tutorial.ipynb').read_text())['cells']
  code = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
  assert not any(cell.get('outputs') for cell in cells)
  for source in code:
    ast.parse(source)
  (changes,) = [re.search(r'changes = \[(.*?)\n  \]', source, re.DOTALL) for source in code if 'changes = [' in source]
  settings = [text.replace('{tau}', '0.2') for text in re.findall(r"f?'([^']+)'", changes[1])]
  chosen = config.load('configs/quickstart.py', settings)
  config.validate(chosen, base.get_config())
