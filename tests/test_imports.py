"""Imports point one way, and the losses can be had without the rest."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Each part, and the parts of ssl_jax that it may import; `names` is for all.
LOSSES = {'temperature', 'pairs', 'losses'}
ALLOWED = {
  'names': set(),
  'temperature': set(),
  'pairs': {'temperature'},
  'losses': LOSSES,
  'models': {'models'},
  'data': {'data'},
  'optim': set(),
  'parallel': set(),
  'config': set(),
  'state': set(),
  'probe': {'optim'},
  'checkpoint': {'config', 'state'},
  'records': {'checkpoint'},
  'methods': LOSSES | {'models', 'methods'},
  'weights': {'models'},
  'step': {'methods', 'probe', 'state'},
  'run': {'config', 'methods', 'models', 'optim', 'data', 'parallel', 'probe', 'state', 'weights'},
}
ALLOWED['figures'] = LOSSES | {'figures'}
ALLOWED['page'] = {'figures', 'checkpoint'}
ALLOWED['evals'] = {*ALLOWED, 'evals'}
ALLOWED['report'] = {*ALLOWED, 'report'}
ALLOWED['export'] = {*ALLOWED} - {'report'}
ALLOWED['train'] = set(ALLOWED) | {'train'}


def imported(file):
  """The parts of ssl_jax that a file imports."""
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'ssl_jax':
      deeper = node.module.split('.')[1:2]
      yield from deeper or [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
      yield from [a.name.split('.')[1] for a in node.names if a.name.startswith('ssl_jax.')]


@pytest.mark.parametrize('file', sorted((ROOT / 'ssl_jax').rglob('*.py')), ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_one_way(file):
  part = file.relative_to(ROOT / 'ssl_jax').parts[0].removesuffix('.py')
  if part != '__init__':
    assert set(imported(file)) <= ALLOWED[part] | {'names'}


def test_only_main_knows_of_train():
  for file in (ROOT / 'ssl_jax').rglob('*.py'):
    if file.name != 'train.py':
      assert 'train' not in set(imported(file)), file


def test_configs_import_only_configs_and_what_reads_them():
  for file in (ROOT / 'configs').glob('*.py'):
    assert set(imported(file)) <= {'config', 'names'}, file


def test_losses_need_only_jax_and_chex():
  code = """
import sys, jax, chex
before = set(sys.modules)
import ssl_jax.losses, ssl_jax.temperature, ssl_jax.pairs
print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
  run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, check=True)
  assert run.stdout.split() == ['ssl_jax']
