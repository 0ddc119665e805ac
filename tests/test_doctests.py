"""The examples of the docstrings run, each public function has one, and `ssl_jax.losses` is light to import."""

import doctest
import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest

MODULES = (
  *('registry', 'arrays', 'temperature', 'pairs', 'losses'),
  *('losses.base', 'losses.contrastive', 'losses.redundancy', 'losses.distillation'),
  *('losses.weighted', 'losses.cancellation'),
)

IMPORT = """
import sys
import ssl_jax.losses
print(*sorted({name.split('.')[0] for name in sys.modules}))
"""


@pytest.mark.parametrize('name', MODULES)
def test_examples(name):
  module = importlib.import_module(f'ssl_jax.{name}')
  with np.printoptions(precision=4, suppress=True):
    failed, attempted = doctest.testmod(module)
  assert attempted and not failed


@pytest.mark.parametrize('name', MODULES)
def test_every_public_function_has_an_example(name):
  module = importlib.import_module(f'ssl_jax.{name}')
  public = [
    value
    for key, value in vars(module).items()
    if not key.startswith('_') and getattr(value, '__module__', '') == module.__name__
    if inspect.isfunction(value) or inspect.isclass(value)
  ]
  assert public or name == 'losses'  # which only re-exports
  assert [value.__name__ for value in public if '>>>' not in (inspect.getdoc(value) or '')] == []


def test_import_is_light():
  found = subprocess.run([sys.executable, '-c', IMPORT], capture_output=True, text=True, check=True).stdout
  heavy = {'flax', 'grain', 'orbax', 'ml_collections', 'tensorflow', 'tensorflow_datasets', 'torch', 'tensorboardX'}
  assert not heavy & set(found.split())
