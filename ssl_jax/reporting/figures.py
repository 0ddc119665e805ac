"""The figures of a report, drawn from plain arrays in the colorblind-safe palette of Okabe and Ito.

Text and lines are drawn in `INK`, a color used for nothing else. A page replaces it with its text color, so that the
same figure is readable on a light and on a dark background. matplotlib is imported when the first figure is drawn.
"""

import base64
import contextlib
import io
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from ssl_jax.evals.features import LAYERS

if TYPE_CHECKING:
  from matplotlib.figure import Figure

INK = '#101418'
COLORS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#999999')
MORE_COLORS = ('#F0E442', '#8C564B', '#5E4FA2')  # for ten classes, whose markers are too small to tell them apart
MARKS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
DASHES = ('-', '--', ':', '-.')
DENSE = 30  # curves with at least this many points have fewer markers
LARGEST = 96  # pixels per side of the images in a figure
PAIRS = {  # {kind of pair: its name, its color}
  'TP': ('true positives', COLORS[2]),
  'FN': ('false negatives', COLORS[1]),
  'TN': ('true negatives', COLORS[0]),
}
MOST_CELLS = 20  # largest number of classes for which a confusion matrix is drawn
STYLE: dict[Any, Any] = {
  'axes.axisbelow': True,
  'axes.edgecolor': INK,
  'axes.labelcolor': INK,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.grid': True,
  'figure.facecolor': 'none',
  'axes.facecolor': 'none',
  'font.size': 10,
  'grid.alpha': 0.18,
  'grid.color': INK,
  'legend.frameon': False,
  'text.parse_math': False,  # names may contain a dollar sign
  'legend.fontsize': 9,
  'lines.linewidth': 1.8,
  'savefig.facecolor': 'none',
  'svg.fonttype': 'none',
  'svg.hashsalt': 'ssl_jax',
  'text.color': INK,
  'xtick.color': INK,
  'ytick.color': INK,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
  """The matplotlib settings of all figures, as a context manager or a decorator."""
  try:
    import matplotlib
  except ImportError:
    raise missing('matplotlib') from None
  with matplotlib.rc_context(STYLE):
    yield


def missing(package: str) -> ValueError:
  """The error for a missing package that figures need."""
  return ValueError(f"figures need {package}, which is not installed: pip install -e '.[plots]'")


def short(name: str, most: int = 24) -> str:
  """A name of at most `most` characters.

  >>> short('temperature', 5)
  'temp…'
  """
  return name if len(name) <= most else name[: most - 1] + '…'


def _figure(width=4.9, height=3.2, rows=1, columns=1, **axes):
  """(figure, axes), without the global state of pyplot."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout='constrained')
  return figure, figure.subplots(rows, columns, **axes)


# Over epochs


class Curve(NamedTuple):
  """A line of a chart. Curves of one label share a color, a marker and an entry in the legend."""

  label: str  # '': the only curve, which needs no legend
  points: Sequence[tuple[float, float]]  # (epoch, value)
  detail: str = ''  # distinguishes curves with the same label
  place: int = 0  # index of the label, which determines its color and marker


class Chart(NamedTuple):
  """Curves over epochs. `chart` draws a static figure, `charts.embed` an interactive one."""

  ylabel: str
  curves: Sequence[Curve]


# {figure: (title, {curve: its name in metrics.jsonl})}. Names with a layer and a slash are logged if `eval.measures`.
CURVES = {
  'loss': ('loss', {'': 'loss'}),
  'learning_rate': ('learning rate', {'': 'learning_rate'}),
  'temperature': ('temperature τ', {'': 'temperature'}),
  'positive_similarity': ('similarity of positives', {'': 'positive_similarity'}),
  'uniformity': ('uniformity', {layer: f'{layer}/uniformity' for layer in LAYERS}),
  'entropy': ('entropy H(X⁻|X)', {layer: f'{layer}/conditional_entropy' for layer in LAYERS}),
  'gaps': ('gap of the bound', {name: f'projector/{name}_gap' for name in ('attracting', 'repelling')}),
}


def accuracies(rows: Sequence[Mapping[str, float]]) -> list[str]:
  """The names of the accuracies that were logged during training, kNN by k."""
  found = {k for row in rows for k in row if re.fullmatch(r'knn\d+(_white)?|linear|online_probe|zero_shot', k)}
  return sorted(found, key=lambda name: (not name.startswith('knn'), len(name), name))


def over_epochs(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
  """(epoch, value) of the rows that have the metric. Rows of evaluations have a step, but no epoch."""
  epochs = [(row['step'], row['epoch']) for row in rows if 'epoch' in row and row['step']]
  per_step = epochs[-1][1] / epochs[-1][0] if epochs else 1
  return [(row['step'] * per_step, row[name]) for row in rows if name in row]


def training(rows: Sequence[Mapping[str, float]]) -> dict[str, Chart]:
  """{name: chart}: loss, learning rate, temperature, similarity of positives, accuracies, measures."""
  plots = CURVES | {'accuracy': ('accuracy, %', {name: name for name in accuracies(rows)})}
  plots |= {'correlation': ('Spearman, × 100', {'mean': 'spearman_mean'})}
  logged = {name for row in rows for name in row}
  return {
    plot: Chart(
      title,
      [
        Curve(label, over_epochs(rows, name), place=place)
        for place, (label, name) in enumerate(names.items())
        if name in logged
      ],
    )
    for plot, (title, names) in plots.items()
    if logged & set(names.values())
  }


@style()
def chart(drawn: Chart) -> 'Figure':
  """A static chart. The legend is below the axis, where long labels fit."""
  figure, axis = _figure()
  labels: set[str] = set()
  for curve in drawn.curves:
    axis.plot(
      *zip(*curve.points, strict=True),
      color=COLORS[curve.place % len(COLORS)],
      linestyle=DASHES[curve.place // len(COLORS) % len(DASHES)],
      marker=MARKS[curve.place % len(MARKS)],
      markevery=1 if len(curve.points) < DENSE else len(curve.points) // 10,
      markersize=4,
      label=None if curve.label in labels else short(curve.label, 48),
    )
    labels.add(curve.label)
  axis.set(ylabel=drawn.ylabel, xlabel='epoch', xlim=(0, None))
  if labels != {''}:
    long = max(map(len, labels)) > 20
    figure.legend(loc='outside lower center', ncols=1 if long else 3, fontsize=8)
  return figure


# Similarities that the loss compares


@style()
def similarities(arrays: Mapping[str, np.ndarray]) -> 'Figure':
  """τ(s) with the distributions of true positives, false negatives and true negatives (DySTreSS Fig. 1 and 3)."""
  figure, axis = _figure()
  draw_similarities(axis, arrays, fill=True)
  axis.set(xlabel='cosine similarity s', ylabel='density', xlim=(-1, 1))
  if 'temperature_tau' in arrays:
    other = axis.twinx()
    other.spines['right'].set_visible(True)
    other.grid(False)
    other.plot(arrays['temperature_s'], arrays['temperature_tau'], color=INK, linestyle='--', label='τ(s)')
    other.set(ylabel='temperature τ', ylim=(0, 1.15 * float(arrays['temperature_tau'].max())))
    axis.plot([], [], color=INK, linestyle='--', label='τ(s)')
  axis.legend(loc='upper center', bbox_to_anchor=(0.5, 1.16), ncols=4, columnspacing=0.9, handlelength=1.1, fontsize=8)
  return figure


def draw_similarities(axis: Any, arrays: Mapping[str, ArrayLike], *, fill: bool = False) -> None:
  """Draws the densities of the similarities of each kind of pair (`PAIRS`), from their histograms."""
  edges = np.asarray(arrays['similarities_edges'])
  for kind, (label, color) in PAIRS.items():
    counts = np.asarray(arrays[f'similarities_{kind}'])
    density = counts / max(counts.sum(), 1) / np.diff(edges)
    if fill:
      axis.stairs(density, edges, fill=True, color=color, alpha=0.35)
    axis.stairs(density, edges, color=color, label=label)


@style()
def penalties(arrays: Mapping[str, np.ndarray]) -> 'Figure':
  """The penalty on negatives by their similarity, at the run's temperature and at constant temperatures."""
  figure, axis = _figure()
  edges = arrays['penalty_edges']
  names = [key for key in arrays if re.fullmatch(r'penalty_[\d.]+', key)]
  for i, name in enumerate(sorted(names, key=lambda key: float(key.split('_')[1]))):
    axis.stairs(arrays[name] / np.diff(edges), edges, color=COLORS[i], label=f'τ = {name.split("_")[1]}')
  if 'penalty_own' in arrays:
    axis.stairs(arrays['penalty_own'] / np.diff(edges), edges, color=INK, linestyle='--', label="the run's τ")
  axis.set(xlabel='similarity of the negative', ylabel='share of the penalty (density)', xlim=(-1, 1))
  axis.legend(loc='upper left')
  return figure


@style()
def separation(mean: np.ndarray, std: np.ndarray) -> 'Figure':
  """Mean similarity of the positive and the nearest negatives, ± one standard deviation (Wang & Liu 2021 Fig. 8)."""
  figure, axis = _figure()
  names = ['pos'] + [f'n{i}' for i in range(1, len(mean))]
  colors = [COLORS[2]] + [COLORS[0]] * (len(mean) - 1)
  axis.bar(names, mean, yerr=std, color=colors, ecolor=INK, capsize=2, error_kw={'elinewidth': 0.8})
  axis.set(ylabel='cosine similarity', xlabel='positive, then the nearest negatives')
  axis.grid(False, axis='x')
  return figure


# Representations


@style()
def uniformity_tolerance(points: Mapping[str, Sequence[float]]) -> 'Figure':
  """{name: (uniformity, same-label similarity)}; up and right is better (Wang & Liu 2021, 4; DySTreSS Fig. 5)."""
  figure, axis = _figure()
  for i, (name, (uniformity, tolerance)) in enumerate(points.items()):
    mark = MARKS[(i + i // len(COLORS)) % len(MARKS)]
    axis.scatter(-uniformity, tolerance, s=60, color=COLORS[i % len(COLORS)], marker=mark, label=short(name, 36))
  axis.set(xlabel='negative uniformity, −log E exp(−2‖x − y‖²)', ylabel='same-label similarity')
  axis.set(xlim=(0, 4.2), ylim=(min(0.0, *(t for _, t in points.values())) - 0.02, 1.02))
  axis.legend(loc='best', fontsize=8)
  return figure


@style()
def plane(points: np.ndarray, labels: np.ndarray, shares: np.ndarray, names: Sequence[str]) -> 'Figure':
  """The first two principal components of the test features. With more than seven classes, markers vary as well."""
  colors = (*COLORS, *MORE_COLORS)
  figure, axis = _figure(5.4, 4.2)
  classes = np.unique(labels)
  common = dict(s=np.clip(9000 / len(points), 9, 40), alpha=0.7, linewidths=0, rasterized=True)
  for i, c in enumerate(classes):
    own = points[labels == c]
    mark = MARKS[i // len(COLORS) % len(MARKS)]
    axis.scatter(*own.T, color=colors[i % len(colors)], marker=mark, label=short(names[c]), **common)
  axis.set(xlabel=f'first component ({shares[0]:.0%})', ylabel=f'second component ({shares[1]:.0%})')
  if len(classes) <= 20:
    axis.legend(loc='center left', bbox_to_anchor=(1, 0.5), markerscale=2, handletextpad=0.1)
  return figure


@style()
def class_accuracy(names: Sequence[str], values: Sequence[float], what: str) -> 'Figure':
  """The accuracy of the worst classes, at most twenty, worst first."""
  order = np.argsort(values, kind='stable')[:20]
  figure, axis = _figure(5.4, 0.9 + 0.24 * len(order))
  labels = [short(names[i]) for i in order]
  axis.barh(range(len(order)), [values[i] for i in order], tick_label=labels, color=COLORS[0])
  axis.invert_yaxis()
  axis.set(xlabel=f'{what}, %', xlim=(0, 100))
  axis.grid(False, axis='y')
  return figure


@style()
def confusion(matrix: np.ndarray, names: Sequence[str]) -> 'Figure':
  """A heat map of the share of each true class (row) that is predicted as each class (column), in percent.  [c, c]"""
  from matplotlib.colors import LinearSegmentedColormap

  count = len(matrix)
  shares = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
  figure, axis = _figure(2 + 0.36 * count, 1.4 + 0.32 * count)
  faint = LinearSegmentedColormap.from_list('faint', [(*_rgb(COLORS[0]), alpha) for alpha in (0.0, 0.65)])
  axis.imshow(shares, cmap=faint, vmin=0, vmax=100, aspect='auto')
  for row in range(count):
    for column in range(count):
      if matrix[row, column]:
        axis.text(column, row, f'{shares[row, column]:.0f}', ha='center', va='center', fontsize=8)
  labels = [short(name, 16) for name in names]
  axis.set(yticks=range(count), yticklabels=labels, xlabel='predicted', ylabel='true class')
  slanted = max(map(len, labels)) > 3
  axis.set_xticks(range(count), labels, **(dict(rotation=45, ha='right', rotation_mode='anchor') if slanted else {}))
  axis.grid(False)
  return figure


def _rgb(code: str) -> tuple[float, ...]:
  return tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))


def sheet(png: bytes, widest: int = 11 * LARGEST) -> bytes:
  """A PNG for a page, reduced to at most 256 colors and `widest` pixels in width."""
  image = Image.open(io.BytesIO(png)).convert('RGBA')  # the gaps between framed images are transparent
  if image.width > widest:
    image = image.resize((widest, round(image.height * widest / image.width)))
  return _png(image)


def _png(image: Image.Image) -> bytes:
  out = io.BytesIO()
  image.quantize(256, method=Image.Quantize.FASTOCTREE).save(out, 'PNG', optimize=True)
  return out.getvalue()


def neighbors(images: np.ndarray, labels: np.ndarray) -> bytes:
  """A PNG with one row per query: the query, then its nearest images, framed in blue (same class) or orange (other).

  images uint8 [r, 1 + k, H, W, 3], labels [r, 1 + k]
  """
  if max(images.shape[2:4]) > LARGEST:  # a page of large photographs would be too large
    images = np.array([[Image.fromarray(image).resize((LARGEST, LARGEST)) for image in row] for row in images])
  scale = max(1, round(64 / images.shape[2]))
  images = images.repeat(scale, axis=2).repeat(scale, axis=3)
  rows, columns, height, width, _ = images.shape
  frame, gap = 4, 6
  side = np.array((height, width)) + 2 * (frame + gap)
  color = lambda code: tuple(round(255 * x) for x in _rgb(code))
  picture = Image.new('RGBA', (columns * side[1] + 2 * gap, rows * side[0]))
  for r in range(rows):
    for c in range(columns):
      # The query has a gray frame and a gap after it.
      code = '#808080' if c == 0 else COLORS[0] if labels[r, c] == labels[r, 0] else COLORS[1]
      left, top = c * side[1] + gap + 2 * gap * (c > 0), r * side[0] + gap
      picture.paste((*color(code), 255), (left, top, left + width + 2 * frame, top + height + 2 * frame))
      picture.paste(Image.fromarray(images[r, c]), (left + frame, top + frame))
  return _png(picture)


# Several runs


@style()
def dots(values: Mapping[str, tuple[float, float | None]], what: str) -> 'Figure':
  """{name: (mean, spread over seeds)}, drawn as points instead of bars, because the axis does not start at 0."""
  figure, axis = _figure(4.9, 0.8 + 0.5 * len(values))
  for i, (name, (mean, spread)) in enumerate(values.items()):
    mark, color = MARKS[(i + i // len(COLORS)) % len(MARKS)], COLORS[i % len(COLORS)]
    axis.errorbar(mean, i, xerr=spread, fmt=mark, color=color, ecolor=INK, capsize=3, markersize=8)
    # The name is above its line: to the left of the axis, a long name would leave no room for the points.
    text = f'{short(name, 52)}: {mean:.2f}'
    axis.annotate(text, (0, i), (4, 8), axis.get_yaxis_transform(), 'offset points', fontsize=9)
  axis.set(xlabel=what, yticks=range(len(values)), yticklabels=[], ylim=(len(values) - 0.6, -0.8))
  axis.margins(x=0.15)
  return figure


@style()
def lines(
  x: np.ndarray, curves: Mapping[str, np.ndarray], *, xlabel: str, ylabel: str, **limits: tuple[float, float]
) -> 'Figure':
  """Analytical curves over one axis; NaN leaves a gap."""
  figure, axis = _figure(4.9, 3.9)
  for i, (name, y) in enumerate(curves.items()):
    axis.plot(x, y, color=COLORS[i % len(COLORS)], linestyle=DASHES[i // len(COLORS) % len(DASHES)], label=name)
  axis.set(xlabel=xlabel, ylabel=ylabel, **limits)
  axis.legend(fontsize=8, loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=2)
  return figure


# Output


def svg(figure: 'Figure', paper: str = 'none') -> str:
  """A figure as an SVG document with background `paper`; equal figures give equal text."""
  out = io.StringIO()
  with style():
    figure.savefig(out, format='svg', metadata={'Date': None}, dpi=150, facecolor=paper)
  return out.getvalue()


def write_svg(figure: 'Figure', path: pathlib.Path) -> None:
  """Writes an SVG file with a white background."""
  path.write_text(svg(figure, 'white'), encoding='utf-8')


def save(figure: 'Figure', path: pathlib.Path) -> None:
  """Writes `path`.svg and `path`.png on a white background."""
  path.parent.mkdir(parents=True, exist_ok=True)
  write_svg(figure, path.with_suffix('.svg'))
  with style():
    figure.savefig(path.with_suffix('.png'), dpi=150, facecolor='white', metadata={'Software': None})


def inline(text: str, name: str, title: str) -> str:
  """An SVG document as an element of a page: without URLs, with unique ids, and in the text color of the page."""
  text = text[text.index('<svg') :]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', '', text)
  text = re.sub(r'(\bid="|url\(#|href="#)', lambda match: f'{match[1]}{name}-', text)
  text = text.replace(INK, 'currentColor')
  width, height = (float(x) for x in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
  head = (
    f'<svg role="img" aria-label="{title}" viewBox="0 0 {width} {height}" style="max-width:{math.ceil(width * 1.5)}px"'
  )
  return head + re.sub(r'^<svg[^>]*', '', text)


def width(png: bytes) -> int:
  """The width of a PNG in pixels."""
  return Image.open(io.BytesIO(png)).width


def data_uri(png: bytes) -> str:
  """A PNG as the source of an image element."""
  return 'data:image/png;base64,' + base64.b64encode(png).decode()
