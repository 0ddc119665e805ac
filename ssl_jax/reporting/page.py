"""Numbers, tables and figures in sections, written as one self-contained HTML page and as Markdown."""

import html
import pathlib
import re
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from ssl_jax.reporting import charts, figures
from ssl_jax.workdir.files import write_text


class Number(NamedTuple):
  """A number, with its key in the files of the run."""

  key: str
  value: float
  form: str = '.2f'
  spread: float | None = None
  best: bool = False  # among the numbers it is compared with

  def __str__(self) -> str:
    shown = format(self.value, self.form)
    return shown if self.spread is None else f'{shown} ± {format(self.spread, self.form.removeprefix("+"))}'


class Table(NamedTuple):
  """A table. If `folded` has a title, the table is collapsed under it."""

  head: Sequence[str]
  rows: Sequence[Sequence[str | Number]]
  folded: str = ''


class Cards(NamedTuple):
  """The most important numbers, in large type."""

  numbers: Sequence[tuple[str, Number]]


class Figure(NamedTuple):
  """A figure with its caption. A `figures.Chart` is interactive on a page."""

  name: str
  caption: str
  drawn: Any  # a `figures.Chart`, a matplotlib figure, or the bytes of a PNG

  @property
  def id(self) -> str:
    """The name in files and in HTML, where it may only have letters, digits, - and _."""
    return re.sub(r'[^\w-]+', '-', self.name, flags=re.ASCII)

  @property
  def still(self) -> Any:
    """The static version: a matplotlib figure, or the bytes of a PNG."""
    return figures.chart(self.drawn) if isinstance(self.drawn, figures.Chart) else self.drawn


class Listing(NamedTuple):
  """Preformatted text with a caption."""

  caption: str
  text: str


Part = Cards | Table | Figure | Listing


class Section(NamedTuple):
  """A title, a paragraph and the parts below it."""

  title: str
  text: str
  parts: Sequence[Part]


def write(folder: pathlib.Path, name: str, title: str, lead: str, sections: Sequence[Section]) -> pathlib.Path:
  """Writes NAME.html, NAME.md and figures/ into `folder`. Returns the path of the page.

  Each line of `lead` is a paragraph.
  """
  for part in (part for section in sections for part in section.parts if isinstance(part, Figure)):
    path = folder / 'figures' / part.id
    if isinstance(part.drawn, bytes):
      path.parent.mkdir(exist_ok=True)
      path.with_suffix('.png').write_bytes(part.drawn)
    else:
      figures.save(part.still, path)
  write_text(folder / f'{name}.md', _markdown(title, lead, sections))
  page = folder / f'{name}.html'
  write_text(page, _page(title, lead, sections))
  print(f'{name}: {page}')
  return page


def _markdown(title, lead, sections) -> str:
  def cell(x):
    text = str(x).replace('|', '\\|')
    return f'**{text}** ★' if isinstance(x, Number) and x.best else text

  out = [f'# {title}', *lead.splitlines()]
  for section in sections:
    out += [f'## {section.title}', section.text]
    for part in section.parts:
      if isinstance(part, Cards):
        part = Table(['', 'value'], part.numbers)
      if isinstance(part, Table):
        lines = [part.head, ['---'] * len(part.head), *part.rows]
        out.append('\n'.join('| ' + ' | '.join(map(cell, line)) + ' |' for line in lines))
      elif isinstance(part, Listing):
        out += [part.caption, f'```text\n{part.text.rstrip()}\n```']
      else:
        suffix = 'png' if isinstance(part.drawn, bytes) else 'svg'
        out.append(f'![{part.caption}](figures/{part.id}.{suffix})\n\n{part.caption}')
  return '\n\n'.join(filter(None, out)) + '\n'


def _page(title, lead, sections) -> str:
  def number(x):
    return f'<data data-key="{html.escape(x.key)}" value="{x.value!r}">{x}</data>'

  def cell(x):
    if isinstance(x, Number):
      mark = ' <span title="best">★</span>' if x.best else ''
      return f'<td class="n{" best" * x.best}">{number(x)}{mark}</td>'
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
    caption, wide = html.escape(part.caption), ''
    if isinstance(part.drawn, figures.Chart):
      picture = f'<div class="chart" id="chart-{part.id}" role="group" aria-label="{caption}"></div>'
    elif isinstance(part.drawn, bytes):
      width = figures.width(part.drawn)
      picture = f'<img alt="{caption}" style="max-width:{width}px" src="{figures.data_uri(part.drawn)}">'
      wide = WIDE
    else:
      picture = figures.inline(figures.svg(part.drawn), part.id, caption)
      wide = WIDE if part.drawn.get_figwidth() > 6 else ''
    return f'<figure id="{part.id}"{wide}>{picture}<figcaption>{caption}</figcaption></figure>'

  def listing(part):
    return f'<p>{html.escape(part.caption)}</p><pre>{html.escape(part.text.rstrip())}</pre>'

  body = []
  for section in sections:
    drawn = [part for part in section.parts if isinstance(part, Figure)]
    text = f'<p>{html.escape(section.text)}</p>' if section.text else ''
    text += ''.join(cards(part) for part in section.parts if isinstance(part, Cards))
    text += ''.join(table(part) for part in section.parts if isinstance(part, Table))
    text += ''.join(listing(part) for part in section.parts if isinstance(part, Listing))
    curves = [curve for part in drawn if isinstance(part.drawn, figures.Chart) for curve in part.drawn.curves]
    if curves:
      long = any(len(curve.points) > charts.MOST_POINTS for curve in curves)
      named = any(curve.label for curve in curves)
      text += f'<p>{INTERACTION}{NAMED_CURVES * named}.{LONG_CURVES * long}</p>'
    if drawn:
      text += f'<div class="figures">{"".join(map(figure, drawn))}</div>'
    body.append(f'<section><h2>{html.escape(section.title)}</h2>{text}</section>')
  parts = [part for section in sections for part in section.parts]
  live = {part.id: part.drawn for part in parts if isinstance(part, Figure) and isinstance(part.drawn, figures.Chart)}
  return PAGE.substitute(
    title=html.escape(title),
    lead=''.join(f'<p>{html.escape(line)}</p>' for line in lead.splitlines()),
    body=''.join(body),
    scripts=charts.embed(live) if live else '',
  )


INTERACTION = 'Point at a curve to read it, drag to zoom'
NAMED_CURVES = ', click on a name below a chart to hide its curve'
LONG_CURVES = f' The {charts.MOST_POINTS} points of a longer curve are means of neighboring rows.'
WIDE = ' class="wide"'
LONG = ' class="long"'
PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; font-src data:;
  style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1f24; --faint: #5b6570; --line: #d9dee3; --card: #f7f9fa;
  --best: #00694d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181c; --ink: #e4e8ec; --faint: #98a4af; --line: #333b43; --card: #1b2127; --best: #4cd3ab; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .25rem; font-size: 1.2rem; border-bottom: 1px solid var(--line); }
p { margin: 0 0 .75rem; color: var(--faint); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--faint); }
td:first-child:not(.long) { white-space: nowrap; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; font-weight: 600; }
td.best { color: var(--best); }
td.long { min-width: 20rem; overflow-wrap: anywhere; }
td.long:first-child { min-width: 11rem; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); margin: 0 0 1rem; }
.cards div { padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
.cards dd { margin: 0; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.2; }
.cards dt { font-size: .85rem; color: var(--faint); }
figure { min-width: 0; margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; }
figure svg, figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
figure svg text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif !important; }
figcaption { margin-top: .5rem; font-size: .85rem; color: var(--faint); }
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure.wide svg { min-width: 36rem; }
.chart { min-height: 20rem; }
pre { margin: 0 0 1rem; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--faint); }
</style>
</head>
<body>
<h1>$title</h1>
$lead
$body
$scripts
</body>
</html>
""")
