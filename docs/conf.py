"""Sphinx settings. Nothing is downloaded, at build time or by a reader's browser; every warning is an error."""

import os
import pathlib
import re
import sys
import typing

sys.path[:0] = [str(pathlib.Path(__file__).parent.parent), str(pathlib.Path(__file__).parent)]
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [sys.path[1], sys.path[0], os.environ.get('PYTHONPATH')]))

import generate  # noqa: E402

import ssl_jax  # noqa: E402

generate.write_all()

project, author, release = 'ssl_jax', 'the ssl_jax authors', ssl_jax.__version__
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
exclude_patterns = [
  '_build',
  *('_generated/config.md', '_generated/recipes.md', '_generated/names.md', '_generated/results.md'),  # included
  *('_generated/reproduce.md', '_generated/by_temperature.md'),
]

html_theme = 'sphinx_book_theme'
html_title = 'ssl_jax'
html_theme_options = {'show_toc_level': 2, 'use_download_button': False, 'use_fullscreen_button': False}
html_static_path = ['_static']
html_css_files = ['custom.css']

myst_enable_extensions = ['colon_fence', 'deflist', 'tasklist']
myst_heading_anchors = 3
# The notebook trains three encoders, about three minutes. DOCS_NOTEBOOK=off skips that.
nb_execution_mode = os.environ.get('DOCS_NOTEBOOK') or 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 1200
nb_ipywidgets_js = {}

napoleon_use_ivar = True
autodoc_typehints = 'signature'
python_maximum_signature_line_length = 88
smartquotes = False
highlight_language = 'none'
nitpicky = True
# Names of other libraries are not links, since no inventory is downloaded; nor are private classes and type variables.
nitpick_ignore_regex = [('py:.*', r'(?!ssl_jax\.).*'), ('py:class', r'ssl_jax\..*\._\w+')]
nitpick_ignore = [
  ('py:class', f'{module}.{name}')
  for module in list(sys.modules)
  if module.startswith('ssl_jax.')
  for name, value in vars(sys.modules[module]).items()
  if isinstance(value, typing.TypeVar)
]


def _restructured(app, what, name, obj, options, lines):
  """Converts docstrings, plain text with `code` in backquotes, to valid reStructuredText."""
  blocks, block = [], []
  for line in [*lines, '']:
    if line.strip():
      block.append(line)
    elif block:
      blocks.append(block)
      block = []
  out = []
  for block in blocks:
    indents = [len(line) - len(line.lstrip()) for line in block]
    first = block[0].lstrip()
    if first.startswith('>>>'):
      out += [*block, '']
    elif re.fullmatch(r'(Args|Returns|Attributes|Raises|Yields):', block[0].strip()) or re.match(r'[-*] ', first):
      out += [*map(_escape, block), '']
    elif min(indents) >= 2 or len(set(indents)) > 1:  # code, or a text in columns
      margin = min(indents)
      out += ['::', '', *(f'    {line[margin:]}' for line in block), '']
    else:
      out += [*map(_escape, block), '']
  lines[:] = out


def _escape(line):
  indent = line[: len(line) - len(line.lstrip())]
  bullet = '- ' if line.lstrip().startswith('- ') else ''
  parts = line[len(indent) + len(bullet) :].split('`')
  parts[::2] = [re.sub(r'([*|\\])|_(?=\W|$)', lambda m: '\\' + m[0], part) for part in parts[::2]]
  return indent + bullet + '``'.join(parts)


def setup(app):
  app.connect('autodoc-process-docstring', _restructured, priority=100)  # before napoleon
