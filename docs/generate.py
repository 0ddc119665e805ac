"""Writes the pages and figures of the documentation that come from the code, so that they cannot go stale.

`conf.py` calls `write_all` before each build. Everything goes to docs/_generated, which git ignores.
"""

import ast
import contextlib
import functools
import importlib
import io
import os
import pathlib
import pkgutil
import re
import shutil
import statistics
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

import concept_figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / 'docs'
GENERATED = DOCS / '_generated'

# The sections of the config reference, each with a line of introduction.
SECTIONS = {
  '': 'Keys of the whole run.',
  'data': 'Which images or sentences to train on, and where they live. See [](data.md).',
  'views': 'What the encoder is shown. `--mode=views` draws it.',
  'small_crops': 'Multi-crop: more views of each image, smaller and of smaller regions.',
  'model': 'Encoder, head, method, loss and temperature. See [](losses.md) and [](methods.md).',
  'optimizer': '',
  'parallel': 'Devices and processes. See [](scaling.md).',
  'checkpoint': '',
  'log': '',
  'eval': 'Evaluations during training, at its end, and of `--mode=evaluate`. See [](evaluation.md).',
  'eval.data': 'Another dataset to evaluate on. An empty value means the same as in `data`.',
}
# Keys of the top level that are shown in one of the sections above.
SHOWN_IN = {
  **dict.fromkeys(('imbalance',), 'data'),
  **dict.fromkeys(('views', 'augment', 'augment_other'), 'views'),
  **dict.fromkeys(('model', 'projector', 'method', 'loss', 'temperature', 'init', 'fork'), 'model'),
}
TITLES = {'': 'Run', 'views': 'Views', 'model': 'What is trained'}

# Pages that are copies of files of the repository.
COPIES = {
  'CONTRIBUTING.md': 'contributing.md',
  'CHANGELOG.md': 'changelog.md',
  'benchmarks/README.md': 'benchmarks.md',
  'benchmarks/cpu.md': 'benchmarks_cpu.md',
  'experiments/README.md': 'experiments/index.md',
}

# The experiments that the page of results shows first.
SHOWN_FIRST = ('dystress', 'behaviour', 'cacr', 'balanced', 'sentences')

# Measured accuracies by constant temperature: (loss and set, experiment, metric, its title, prefix of the rows).
BY_TEMPERATURE = (
  ('NT-Xent, CIFAR-10', 'dystress', 'knn200', 'kNN-200', 'simclr_'),
  ('NT-Xent, CIFAR-100', 'dystress', 'knn200', 'kNN-200', 'cifar100_simclr_'),
  ('NT-Xent, CIFAR-10-LT', 'long_tail', 'knn1', '1-NN', 'simclr_'),
  ('NT-Xent, CIFAR-100-LT', 'long_tail', 'knn1', '1-NN', 'cifar100_simclr_'),
  ('memory bank, 49,999 negatives, CIFAR-10', 'behaviour', 'linear', 'linear', 'contrastive_'),
  ('memory bank, 49,999 negatives, CIFAR-100', 'behaviour', 'linear', 'linear', 'cifar100_contrastive_'),
  ('memory bank, 4,095 nearest negatives, CIFAR-10', 'behaviour', 'linear', 'linear', 'hard_'),
)

# The pages of the API, in the order of the imports.
API = {
  'Library': ('temperature', 'pairs', 'stream', 'losses', 'arrays', 'registry'),
  'Models': ('models',),
  'Data': ('data',),
  'Methods': ('methods',),
  'Config and runs': ('config', 'run', 'train', 'workdir'),
  'Evaluation': ('evals',),
  'Reporting': ('reporting',),
}


def write_all() -> None:
  """Writes every generated page and figure. An unchanged page is not rewritten, so Sphinx does not read it again."""
  pages = {
    'config.md': config_reference(),
    'recipes.md': recipes(),
    'names.md': names(),
    'results.md': result_sections(),
    'by_temperature.md': by_temperature(),
    'reproduce.md': reproduced(),
    **api_pages(),
    **copied_pages(),
  }
  for name, text in pages.items():
    _write(GENERATED / name, text)
  concept_figures.draw(GENERATED / 'figures')


def _write(file: pathlib.Path, text: str) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  if not file.exists() or file.read_text() != text:
    file.write_text(text)


# Config reference


def comments_of(file: pathlib.Path) -> dict[int, str]:
  """{line: its comment}, where a comment on lines of its own belongs to the next line of code."""
  found, waiting, last = {}, [], 0
  for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
    line = token.start[0]
    if token.type == tokenize.COMMENT:
      text = token.string.lstrip('# ').rstrip()
      if line == last:
        found[line] = f'{found[line]} {text}' if line in found else text
      else:
        waiting.append(text)
    elif token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
      if token.type == tokenize.NL and not token.line.strip():
        waiting = []  # a comment before an empty line is about the lines below it, not about one of them
    elif token.type != tokenize.NEWLINE:
      if waiting and line != last:
        found[line], waiting = ' '.join(waiting), []
      last = token.end[0]
  return found


def config_keys() -> list[tuple[str, Any, str]]:
  """(key, default, comment) of every key of configs/base.py, in its order."""
  from configs import base

  file = ROOT / 'configs' / 'base.py'
  comments, keys = comments_of(file), []
  function = next(node for node in ast.parse(file.read_text()).body if getattr(node, 'name', '') == 'get_config')
  config = base.get_config()
  for node in ast.walk(function):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
      key = ast.unparse(node.targets[0]).removeprefix('config.')
      comment = comments.get(node.lineno, '') or comments.get(node.end_lineno, '')
      keys.append((key, _value(config, key), comment))
  return keys


def _value(config: Mapping, key: str) -> Any:
  for part in key.split('.'):
    config = config[part]
  return config


def config_reference() -> str:
  """Every key, its default, its meaning and its choices, in a table for each section."""
  from ssl_jax import config as configs
  from ssl_jax.evals import settings

  known = configs.CHOICES | {f'eval.{key}': choices for key, choices in settings.CHOICES.items()}
  rows: dict[str, list[str]] = {section: [] for section in SECTIONS}
  for key, value, comment in config_keys():
    section, _, _ = key.rpartition('.')
    if key in SECTIONS and key not in SHOWN_IN:
      continue  # the section itself
    section = SHOWN_IN.get(key, section)
    value = dict(value) if hasattr(value, 'to_dict') else value
    default = f'dict({", ".join(f"{k}={v!r}" for k, v in value.items())})' if isinstance(value, dict) else repr(value)
    choices = [repr(choice) for choice in known.get(key, ())]
    meaning = _cell(comment)
    if choices:
      meaning += f'{". " if meaning else ""}Choices: `{"`, `".join(choices)}`'
    rows[section].append(f'| `{key}` | `{_cell(default)}` | {meaning} |')
  parts = []
  for section, lines in rows.items():
    title = TITLES.get(section, f'`{section}`')
    table = '\n'.join(['| key | default | meaning |', '|---|---|---|', *lines])
    parts.append('\n\n'.join(filter(None, [f'## {title}', SECTIONS[section], table])))
  return '\n\n'.join(parts) + '\n'


def _cell(text: str) -> str:
  return text.replace('|', '\\|').replace('\n', ' ')


# Recipes


def recipe_files() -> dict[str, Any]:
  """{name: module} of the config files, base.py excepted."""
  files = sorted(file.stem for file in (ROOT / 'configs').glob('*.py'))
  return {name: importlib.import_module(f'configs.{name}') for name in files if name not in ('__init__', 'base')}


def recipes() -> str:
  """Every config file with its command, and every option of it with what it changes."""
  order = ('quickstart', 'cifar10', 'imagenet', 'imagenet100')
  modules = recipe_files()
  names = [*order, *(name for name in modules if name not in order)]
  seen: dict[str, tuple[str, Any]] = {}
  parts = []
  for name in names:
    module = modules[name]
    title, _, rest = module.__doc__.strip().partition('\n')
    lines = [f'## `configs/{name}.py`', _plain(title), *_paragraphs(rest)]
    variants = getattr(module, 'VARIANTS', {})
    explained = _option_comments(ROOT / 'configs' / f'{name}.py')
    same: dict[str, list[str]] = {}
    for option, changes in variants.items():
      first = seen.setdefault(option, (name, changes))
      if first[0] != name and first[1] == changes:
        same.setdefault(first[0], []).append(f'`{option}`')
        continue
      settings = ' '.join(f'`{key}={_literal(value)}`' for key, value in _flat(changes))
      meaning = [_plain(explained[option]), ''] if option in explained else []
      lines.append('\n'.join([f'`{option}`', ': ' + '\n  '.join([*meaning, settings])]))
    for other, options in same.items():
      lines.append(f'As in [`configs/{other}.py`](#configs-{other.replace("_", "-")}-py): {", ".join(options)}.')
    parts.append('\n\n'.join(lines))
  return '\n\n'.join(parts) + '\n'


def _flat(changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """The changes of an option as the keys of flags; a named section has its name first."""
  for key, value in changes.items():
    if isinstance(value, Mapping):
      yield from ((f'{key}.{inner}', x) for inner, x in value.items())
    else:
      yield key, value


def _literal(value: Any) -> str:
  return value if isinstance(value, str) else repr(value)


def _option_comments(file: pathlib.Path) -> dict[str, str]:
  """{option: the comment before it} of a file's VARIANTS."""
  comments, found = comments_of(file), {}
  for node in ast.parse(file.read_text()).body:
    if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == 'VARIANTS':
      keys = node.value.keys if isinstance(node.value, ast.Dict) else ()
      found |= {key.value: comments[key.lineno] for key in keys if key is not None and key.lineno in comments}
  return found


def _paragraphs(text: str) -> list[str]:
  """Paragraphs of a docstring; indented ones are commands."""
  found = []
  for block in re.split(r'\n\s*\n', text.strip('\n')):
    if block.startswith('  '):
      lines = [line.removeprefix('  ') for line in block.splitlines()]
      found.append('\n'.join(['```', *lines, '```']))
    elif block.strip():
      found.append(_plain(block))
  return found


def _plain(text: str) -> str:
  """Text whose asterisks and angle brackets are not markup."""
  parts = text.split('`')
  parts[::2] = [part.replace('<', r'\<').replace('*', r'\*') for part in parts[::2]]
  return '`'.join(parts)


def names() -> str:
  """What each named section of a config can name, with its parameters and their defaults."""
  from ssl_jax import losses, methods, models, temperature
  from ssl_jax.data import augment, imbalance
  from ssl_jax.evals import linear
  from ssl_jax.registry import arguments

  def rows(table: Mapping[str, Any], hidden: tuple[str, ...] = ()) -> str:
    lines = ['| name | parameters |', '|---|---|']
    for name, entry in table.items():
      parameters = [p for key, p in arguments(entry).items() if key not in hidden]
      shown = [p.name if p.default is p.empty else f'{p.name}={_default(p.default)}' for p in parameters]
      lines.append(f'| `{name}` | {_cell(", ".join(f"`{text}`" for text in shown)) or "none"} |')
    return '\n'.join(lines)

  common = methods.Method.GIVEN
  given = ('pos', 'neg', 'where', 'view_pairs', 'axis_name', 'temperature', 'z1', 'z2')
  other = {name: loss for kind in methods.METHODS.values() for name, loss in kind.accepts.items()}
  other = {name: loss for name, loss in other.items() if name not in losses.CONTRASTIVE}
  listed = lambda found: ', '.join(f'`{name}`' for name in found)
  clock = ('steps_per_epoch', 'total_steps')
  parts = [
    ('`method`', rows(methods.METHODS, common)),
    ('`loss`, contrastive', rows(losses.CONTRASTIVE, given)),
    ('`loss`, for single methods', 'Each method accepts its own: ' + listed(other) + '. See [](losses.md).'),
    ('`temperature`', rows(temperature.OF_SIMILARITY | temperature.OF_STEP, clock)),
    ('`model`', listed(models.ENCODERS) + '.'),
    ('`projector`', listed(models.heads.HEADS) + '.'),
    ('`augment`', listed(augment.PRESETS) + '.'),
    ('`imbalance`', rows(imbalance.RULES, ('labels',))),
    ('`eval.linear`', '`logistic`, `ridge`, ' + listed(linear.PROTOCOLS) + '.'),
  ]
  return '\n\n'.join(f'### {title}\n\n{body}' for title, body in parts) + '\n'


def _default(value: Any) -> str:
  return getattr(value, '__name__', None) or repr(value)


# API


def modules_of(unit: str) -> list[str]:
  """The modules of a unit of the package, 'ssl_jax.data' and those below it, that have something to document."""
  name = f'ssl_jax.{unit}'
  module = importlib.import_module(name)
  found = [name]
  for info in pkgutil.walk_packages(getattr(module, '__path__', ()), f'{name}.'):
    found.append(info.name)
  return [name for name in found if importlib.import_module(name).__doc__ or not hasattr(module, '__path__')]


def api_pages() -> dict[str, str]:
  """A page for each group of modules."""
  pages = {}
  for title, units in API.items():
    blocks = [f'# {title}', '```{contents}\n:local:\n:depth: 1\n```']
    for unit in units:
      for module in modules_of(unit):
        options = ':members:\n:ignore-module-all:\n:member-order: bysource'
        blocks.append(f'## {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n')
        blocks[-1] += '\n'.join(f'   {line}' for line in options.splitlines()) + '\n```'
    pages[api_page(title)] = '\n\n'.join(blocks) + '\n'
  return pages


def api_page(title: str) -> str:
  return f'api/{title.lower().replace(" ", "_")}.md'


# Copies of the repository's own pages


def copied_pages() -> dict[str, str]:
  """The READMEs of the experiments and other pages, with links that lead to pages of this site."""
  files = {target: ROOT / source for source, target in _copies().items()}
  return {target: _relinked(file.read_text(), file, GENERATED / target) for target, file in files.items()}


@functools.cache
def _copies() -> dict[str, str]:
  """{page of the repository: its copy}"""
  files = sorted((ROOT / 'experiments').glob('*/README.md'))
  return COPIES | {str(file.relative_to(ROOT)): f'experiments/{file.parent.name}.md' for file in files}


def _relinked(text: str, source: pathlib.Path, target: pathlib.Path) -> str:
  """Text of the file `source`, with links and images that work in the page `target`."""
  pages = _copies()

  def link(match: re.Match) -> str:
    image, text, address = match.groups()
    if re.match(r'[a-z]+:|#', address):
      return match[0]
    path, hash_, anchor = address.partition('#')
    found = (source.parent / path).resolve()
    name = os.path.relpath(found, ROOT)
    if image:
      copy = GENERATED / 'images' / name.replace('/', '_')
      copy.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(found, copy)
      return f'![{text}]({os.path.relpath(copy, target.parent)})'
    if name in pages:
      page = GENERATED / pages[name]
    elif found.is_relative_to(DOCS) and found.suffix in ('.md', '.ipynb') and found.exists():
      page = found
    else:
      return f'{text} (`{name}`)' if text.strip('`') not in name else f'`{name}`'
    return f'[{text}]({os.path.relpath(page, target.parent)}{hash_}{anchor})'

  return re.sub(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)', link, text)


def result_sections() -> str:
  """A section for each experiment that was run: answer, claims, first figure, link to its page; then the others."""
  files = {file.parent.name: file for file in sorted((ROOT / 'experiments').glob('*/README.md'))}
  parts, waiting = [], []
  for name in dict.fromkeys([*SHOWN_FIRST, *files]):
    file = files[name]
    title, _, rest = file.read_text().removeprefix('# ').partition('\n')
    if (file.parent / 'sweep.py').exists() and not (file.parent / 'results.jsonl').exists():
      waiting.append(f'- [{title}](_generated/experiments/{name}.md)')
      continue
    block = [f'## {title}', rest.strip().split('\n\n')[0]]
    if claims := re.search(r'## Claims of the paper\n\n(.*?)(?=\n!\[|\n## )', rest, re.DOTALL):
      block.append(claims[1].strip())
    image = r'!\[[^\]]*\]\([^)]+\)'  # above the table with its caption, or else the table's own
    above = re.search(rf'{image}\n\n(?!#).*?(?=\n\n)', rest.partition('<!-- table -->')[0], re.DOTALL)
    if picture := above or re.search(image, rest):
      block.append(picture[0])
    block.append('[Full table, findings and commands](README.md)')
    parts.append(_relinked('\n\n'.join(block), file, DOCS / 'results.md'))
  return '\n\n'.join([*parts, '## Ready, not run', '\n'.join(waiting)]) + '\n'


def by_temperature() -> str:
  """The table of accuracies by temperature; the best of each line is bold."""
  from experiments import tables

  lines = []
  for title, name, metric, what, prefix in BY_TEMPERATURE:
    found: dict[str, list[float]] = {}
    for result in tables.read(ROOT / 'experiments' / name / 'results.jsonl'):
      found.setdefault(result['name'], []).append(result['metrics'].get(metric))
    means = {tau: statistics.mean(found[row]) for tau, row in tables.temperatures(found, prefix).items()}
    lines.append((f'[{title}](_generated/experiments/{name}.md)', what, means))
  taus = sorted(set().union(*(means for _, _, means in lines)))
  rows = [['loss and set', 'accuracy', *(f'τ = {tau:g}' for tau in taus)], ['---'] * (len(taus) + 2)]
  for title, what, means in lines:
    cells = {tau: f'{mean:.2f}' if mean < max(means.values()) else f'**{mean:.2f}**' for tau, mean in means.items()}
    rows.append([title, what, *(cells.get(tau, '') for tau in taus)])
  return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def reproduced() -> str:
  """Every table and figure of the papers, with its command and status."""
  from experiments import papers

  with contextlib.chdir(ROOT):  # the rows name their config files relative to it
    return papers.markdown()


if __name__ == '__main__':
  write_all()
