"""Interactive charts for a page: the reader can read values, zoom, and hide curves.

Bokeh draws them in the browser. Its library is copied into the page from the installed package, so that a page is one
file and works offline. Bokeh is imported when the first chart is drawn.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssl_jax.reporting.figures import COLORS, DENSE, INK, Chart, missing, short

MARKS = ('circle', 'square', 'triangle', 'diamond', 'inverted_triangle', 'plus', 'x', 'star')
DASHES = ('solid', 'dashed', 'dotted', 'dashdot')
MOST_POINTS = 500  # of a curve: more are indistinguishable on a screen and make the page large
MOST_TOOLTIPS = 6  # with more curves, only the one under the pointer shows a tooltip


def embed(charts: Mapping[str, Chart]) -> str:
  """The scripts that draw each chart into the element `chart-NAME` of the page.

  The charts share the epoch axis. Hiding a curve in one chart hides it in all.
  """
  try:
    from bokeh.document import Document
    from bokeh.models import Range1d
    from bokeh.resources import Resources
  except ImportError:
    raise missing('bokeh') from None
  last = max((x for chart in charts.values() for curve in chart.curves for x, _ in curve.points), default=0) or 1
  epochs = Range1d(start=-0.02 * last, end=1.02 * last, bounds='auto')
  document = Document()
  same: dict[tuple, list] = {}  # the renderers of the same curve in all charts
  roots = {}
  for name, chart in charts.items():
    plot, drawn = _plot(chart, epochs)
    for key, renderer in drawn.items():
      same.setdefault(key, []).append(renderer)
    document.add_root(plot)
    roots[plot.id] = f'chart-{name}'
  for renderers in same.values():
    if len(renderers) > 1:
      for one, other in zip(renderers, [*renderers[1:], renderers[0]], strict=True):
        one.js_link('visible', other, 'visible')
  ids: dict[str, str] = {}
  content = _numbered(document.to_json(deferred=False), ids)
  items = [{'docid': 'charts', 'roots': {ids[root]: element for root, element in roots.items()}}]
  items[0]['root_ids'] = list(items[0]['roots'])
  text = json.dumps({'documents': {'charts': content}, 'items': items}, separators=(',', ':'), ensure_ascii=False)
  text = text.replace(INK, 'currentColor').replace('<', '\\u003c')
  library = Resources(mode='inline', components=['bokeh']).js_raw[0]
  return f'<script>{library}</script>\n' + SCRIPTS % text


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> np.ndarray:
  """The points of a curve or, if there are more than `most`, the means of consecutive points.  -> [n, 2]

  >>> thin([(0, 4.0), (1, 2.0), (2, 9.0), (3, 1.0)], most=2).tolist()
  [[0.5, 3.0], [2.5, 5.0]]
  """
  array = np.array(points, np.float64).reshape(-1, 2)
  if len(array) <= most:
    return array
  return np.stack([stretch.mean(axis=0) for stretch in np.array_split(array, most)])


def _plot(chart: Chart, epochs: Any) -> tuple[Any, dict[tuple, Any]]:
  """The Bokeh figure of a chart, and its renderers by curve and kind."""
  from bokeh.models import DataRange1d, HoverTool
  from bokeh.plotting import figure

  labels = {curve.label for curve in chart.curves if curve.label}
  highest = max((abs(y) for curve in chart.curves for _, y in curve.points), default=1.0)
  plot = figure(
    height=320 + 20 * len(labels),
    sizing_mode='stretch_width',
    x_range=epochs,
    y_range=DataRange1d(default_span=max(highest, 1e-6)),  # for a constant curve; the default is 2
    x_axis_label='epoch',
    y_axis_label=chart.ylabel,
    tools='box_zoom,pan,wheel_zoom,reset,save',
    active_drag='box_zoom',
    toolbar_location='above',
    background_fill_color=None,
    border_fill_color=None,
    outline_line_color=None,
  )
  plot.toolbar.logo = None
  lines: list[Any] = []
  drawn: dict[tuple, Any] = {}
  for curve in chart.curves:
    points = thin(curve.points)
    x, y = points.T.astype(np.float32)
    color = COLORS[curve.place % len(COLORS)]
    named: dict[str, Any] = {'color': color}
    if labels:
      named['legend_label'] = short(curve.label, 44)
    named['name'] = ', '.join(filter(None, (curve.label, curve.detail))) or chart.ylabel
    dash = DASHES[curve.place // len(COLORS) % len(DASHES)]
    line = plot.line(x, y, line_width=2, line_dash=dash, **named)
    every = 1 if len(x) < DENSE else len(x) // 10
    marks = plot.scatter(x[::every], y[::every], size=7, marker=MARKS[curve.place % len(MARKS)], **named)
    lines.append(line)
    drawn |= {(curve.label, curve.detail, kind): part for kind, part in (('line', line), ('marks', marks))}
  mode: Any = 'vline' if len(lines) <= MOST_TOOLTIPS else 'mouse'
  tips = [('', '$name'), ('epoch', '@x{0.[00]}'), (chart.ylabel, '@y{%.4g}')]
  plot.add_tools(HoverTool(renderers=lines, mode=mode, tooltips=tips, formatters={'@y': 'printf'}))
  _style(plot)
  return plot, drawn


def _style(plot: Any) -> None:
  """Sets the colors and sizes of the axes, and moves the legend, if any, below the plot."""
  for axis in plot.axis:
    axis.update(axis_label_text_font_size='13px', major_label_text_font_size='12px', minor_tick_line_color=None)
    axis.update(axis_label_text_color=INK, major_label_text_color=INK, axis_line_color=INK, major_tick_line_color=INK)
    axis.axis_label_text_font_style = 'normal'
  for grid in plot.grid:
    grid.update(grid_line_color=INK, grid_line_alpha=0.15)
  if plot.legend:
    box = plot.legend[0]
    box.update(click_policy='hide', label_text_color=INK, label_text_font_size='12px', inactive_fill_color=INK)
    box.update(background_fill_color=None, border_line_color=None, inactive_fill_alpha=0.15, padding=0, spacing=0)
    box.update(margin=0, location='left')
    plot.add_layout(box, 'below')


def _numbered(content: Any, ids: dict[str, str]) -> Any:
  """Replaces Bokeh's ids, which differ from call to call, with numbers in order of appearance, added to `ids`."""
  if isinstance(content, Mapping):
    renamed = {}
    for key, value in content.items():
      if key == 'id' and isinstance(value, str):
        renamed[key] = ids.setdefault(value, f'c{len(ids) + 1}')
      else:
        renamed[key] = _numbered(value, ids)
    return renamed
  if isinstance(content, list | tuple):
    return [_numbered(value, ids) for value in content]
  return content


# A canvas does not inherit the colors of the page, so the script fills in the text color when it draws.
SCRIPTS = """<noscript><p>The charts need JavaScript; the same figures are in the folder figures/.</p></noscript>
<script type="application/json" id="charts">%s</script>
<script>
const ink = getComputedStyle(document.body).color;
const charts = JSON.parse(document.getElementById('charts').textContent.replaceAll('currentColor', ink));
Bokeh.logger.set_level('warn');
Bokeh.embed.embed_items(charts.documents, charts.items);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => location.reload());
</script>
"""
