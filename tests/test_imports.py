"""Imports point one way, and the losses can be used without the rest."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# From the bottom to the top. A part may import those of lower layers, and itself.
LAYERS = (
  ('registry', 'arrays'),
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
