"""Every public function and method of ssl_jax states the types of its arguments and of what it returns."""

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / 'ssl_jax'
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  """Functions and methods of public classes; not the functions inside functions."""
  for node in body:
    if isinstance(node, FUNCTION) and (not node.name.startswith('_') or node.name in ('__init__', '__call__')):
      yield node
    elif (isinstance(node, ast.ClassDef) and not node.name.startswith('_')) or isinstance(node, ast.If | ast.Try):
      yield from public_functions(node.body)


def missing(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
  arguments = function.args
  named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
  untyped = [a.arg for a in named if a.annotation is None and a.arg not in ('self', 'cls')]
  return untyped + ['return'] * (function.returns is None and function.name != '__init__')


def test_public_functions_are_annotated():
  found = []
  for path in sorted(PACKAGE.rglob('*.py')):
    module = path.relative_to(PACKAGE)
    if not any(part.startswith('_') and part != '__init__.py' for part in module.parts):
      for function in public_functions(ast.parse(path.read_text()).body):
        if names := missing(function):
          found.append(f'{module}:{function.lineno} {function.name}: {", ".join(names)}')
  assert not found, '\n'.join(found)


def test_types_are_installed():
  setup = configparser.ConfigParser()
  setup.read(PACKAGE.parent / 'setup.cfg')
  assert (PACKAGE / setup['options.package_data']['ssl_jax']).name == 'py.typed'
  assert (PACKAGE / 'py.typed').exists()
