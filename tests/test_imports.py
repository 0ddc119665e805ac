"""Imports point one way, and the losses can be used without the rest."""

import ast
import configparser
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# From the bottom to the top. A part may import those of lower layers, and itself.
LAYERS = (
  ('registry', 'arrays', 'kernels'),
  ('stream',),
  ('temperature',),
  ('pairs', 'models', 'config'),
  ('losses', 'data'),
  ('methods',),
  ('run',),
  ('workdir',),
  ('evals',),
  ('reporting',),
  ('train',),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
FILES = [file for file in sorted((ROOT / 'ssl_jax').rglob('*.py')) if file != ROOT / 'ssl_jax' / '__init__.py']


def imported(file):
  """The parts of ssl_jax that a file imports."""
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'ssl_jax':
      yield from node.module.split('.')[1:2] or [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
      yield from [a.name.split('.')[1] for a in node.names if a.name.startswith('ssl_jax.')]


@pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_one_way(file):
  part = file.relative_to(ROOT / 'ssl_jax').parts[0].removesuffix('.py')
  above = {other for other in set(imported(file)) - {part, '__version__'} if LEVEL[other] >= LEVEL[part]}
  assert not above


def test_configs_import_only_configs_and_what_reads_them():
  for file in (ROOT / 'configs').glob('*.py'):
    assert set(imported(file)) <= {'config', 'registry'}, file


def test_losses_need_only_jax_and_chex():
  code = """
import sys, jax, chex
before = set(sys.modules)
import ssl_jax.losses, ssl_jax.temperature, ssl_jax.pairs
print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, check=True)
  assert run.stdout.split() == ['ssl_jax']


def requirements(text):
  """The names of the packages in a list of setup.cfg.

  >>> requirements('jax>=0.10')
  {'jax'}
  """
  return set(re.findall(r'^[\w-]+', text, re.MULTILINE))


def test_the_package_needs_only_jax_and_chex_and_the_extras_the_rest():
  setup = configparser.ConfigParser()
  setup.read(ROOT / 'setup.cfg')
  extras = {name: requirements(text) for name, text in setup['options.extras_require'].items()}
  assert requirements(setup['options']['install_requires']) == {'jax', 'chex'}
  assert extras['train'] | extras['tfds'] | extras['plots'] <= extras['dev']
  # Whatever a module imports when it is imported comes with [train].
  modules = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax', 'pillow': 'PIL', 'pyyaml': 'yaml'}
  installed = {modules.get(name, name) for name in {'jax', 'chex', 'ssl_jax', 'configs'} | extras['train']}
  for file in FILES:
    nodes = ast.parse(file.read_text()).body
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split('.')[0] for name in found} <= installed | sys.stdlib_module_names, file


@pytest.mark.slow
def test_grain_and_tfds_are_imported_only_where_they_are_used():
  code = """
import sys
import ssl_jax.evals.evaluate, ssl_jax.reporting.views, ssl_jax.train
print({'grain', 'tensorflow_datasets', 'array_record', 'matplotlib'} & set(sys.modules))
"""
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, check=True)
  assert run.stdout == 'set()\n'
