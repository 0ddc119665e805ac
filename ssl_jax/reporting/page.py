"""Numbers, tables and figures in sections, written as one self-contained HTML page and as Markdown."""

import html
import pathlib
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from ssl_jax.reporting import figures
from ssl_jax.workdir.files import write_text


class Number(NamedTuple):
  """A number, with its key in the files of the run."""

  key: str
  value: float
  form: str = '.2f'
  spread: float | None = None

  def __str__(self) -> str:
    shown = format(self.value, self.form)
    return shown if self.spread is None else f'{shown} ± {format(self.spread, self.form)}'


class Table(NamedTuple):
  """A table; with a title in `folded` it is hidden until a reader opens it."""

  head: Sequence[str]
  rows: Sequence[Sequence[str | Number]]
  folded: str = ''


class Cards(NamedTuple):
  """The most important numbers, in large type."""

  numbers: Sequence[tuple[str, Number]]


class Figure(NamedTuple):
  """A figure with its caption; small figures share a row."""

  name: str
  caption: str
  drawn: Any  # a matplotlib figure, or the bytes of a PNG
  small: bool = False


Part = Cards | Table | Figure


class Section(NamedTuple):
  """A title, a paragraph and the parts below it."""

  title: str
  text: str
  parts: Sequence[Part]


def write(folder: pathlib.Path, name: str, title: str, lead: str, sections: Sequence[Section]) -> pathlib.Path:
  """Writes NAME.html, NAME.md and figures/ into `folder`. Returns the path of the page."""
  for part in (part for section in sections for part in section.parts if isinstance(part, Figure)):
    path = folder / 'figures' / part.name
    if isinstance(part.drawn, bytes):
      path.parent.mkdir(exist_ok=True)
      path.with_suffix('.png').write_bytes(part.drawn)
    else:
      figures.save(part.drawn, path)
  write_text(folder / f'{name}.md', _markdown(title, lead, sections))
  page = folder / f'{name}.html'
  write_text(page, _page(title, lead, sections))
  print(f'{name}: {page}')
  return page


def _markdown(title, lead, sections) -> str:
  cell = lambda x: str(x).replace('|', '\\|')
  out = [f'# {title}', lead]
  for section in sections:
    out += [f'## {section.title}', section.text]
    for part in section.parts:
      if isinstance(part, Cards):
        part = Table(['', 'value'], part.numbers)
      if isinstance(part, Table):
        lines = [part.head, ['---'] * len(part.head), *part.rows]
        out.append('\n'.join('| ' + ' | '.join(map(cell, line)) + ' |' for line in lines))
      else:
        suffix = 'png' if isinstance(part.drawn, bytes) else 'svg'
        out.append(f'![{part.caption}](figures/{part.name}.{suffix})\n\n{part.caption}')
  return '\n\n'.join(filter(None, out)) + '\n'


def _page(title, lead, sections) -> str:
  def number(x):
    return f'<data data-key="{html.escape(x.key)}" value="{x.value!r}">{x}</data>'

  def cell(x):
    if isinstance(x, Number):
      return f'<td class="n">{number(x)}</td>'
    return f'<td{LONG if len(x) > 24 else ""}>{html.escape(x)}</td>'

  def cards(part):
    items = ''.join(f'<div><dd>{number(x)}</dd><dt>{html.escape(label)}</dt></div>' for label, x in part.numbers)
    return f'<dl class="cards">{items}</dl>'

  def table(part):
    head = ''.join(f'<th>{html.escape(x)}</th>' for x in part.head)
    rows = ''.join(f'<tr>{"".join(map(cell, row))}</tr>' for row in part.rows)
    text = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f'<details><summary>{html.escape(part.folded)}</summary>{text}</details>' if part.folded else text

  def figure(part):
    caption = html.escape(part.caption)
    if isinstance(part.drawn, bytes):
      picture = f'<img alt="{caption}" src="{figures.data_uri(part.drawn)}">'
    else:
      picture = figures.inline(figures.svg(part.drawn), part.name, caption)
    return f'<figure id="{part.name}">{picture}<figcaption>{caption}</figcaption></figure>'

  body = []
  for section in sections:
    drawn = [part for part in section.parts if isinstance(part, Figure)]
    text = f'<p>{html.escape(section.text)}</p>' if section.text else ''
    text += ''.join(cards(part) for part in section.parts if isinstance(part, Cards))
    text += ''.join(table(part) for part in section.parts if isinstance(part, Table))
    if drawn:
      kind = 'figures small' if all(part.small for part in drawn) else 'figures'
      text += f'<div class="{kind}">{"".join(map(figure, drawn))}</div>'
    body.append(f'<section><h2>{html.escape(section.title)}</h2>{text}</section>')
  return PAGE.substitute(title=html.escape(title), lead=html.escape(lead), body=''.join(body))


LONG = ' class="long"'
PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1f24; --faint: #5b6570; --line: #d9dee3; --card: #f7f9fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181c; --ink: #e4e8ec; --faint: #98a4af; --line: #333b43; --card: #1b2127; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.75rem; line-height: 1.2; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .25rem; font-size: 1.2rem; border-bottom: 1px solid var(--line); }
p { margin: 0 0 .75rem; color: var(--faint); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--faint); }
td:first-child { white-space: nowrap; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; font-weight: 600; }
td.long { min-width: 24rem; overflow-wrap: anywhere; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
.figures.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr)); }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); margin: 0 0 1rem; }
.cards div { padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.cards dd { margin: 0; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.2; }
.cards dt { font-size: .85rem; color: var(--faint); }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
figure svg, figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
figure svg text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif !important; }
figcaption { margin-top: .5rem; font-size: .85rem; color: var(--faint); }
summary { cursor: pointer; color: var(--faint); }
</style>
</head>
<body>
<h1>$title</h1>
<p>$lead</p>
$body
</body>
</html>
""")
