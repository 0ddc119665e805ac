"""The figures of the concepts page, drawn by calling the library."""

import pathlib

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ssl_jax import losses, pairs, temperature
from ssl_jax.reporting.figures import COLORS, style, write_svg

SIMILARITIES = jnp.linspace(-1, 1, 401)


def draw(folder: pathlib.Path) -> None:
  """Writes an SVG file for each figure."""
  matplotlib.use('agg')
  folder.mkdir(parents=True, exist_ok=True)
  with style(), plt.rc_context({'axes.prop_cycle': plt.cycler(color=COLORS)}):
    for name, figure in FIGURES.items():
      write_svg(figure(), folder / f'{name}.svg')
    plt.close('all')


def temperatures() -> Figure:
  """Temperature functions of the similarity."""
  s = SIMILARITIES
  figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2), layout='constrained', sharey=True)
  for name in ('constant', 'cosine', 'linear', 'exponential', 'monotonic_cosine'):
    function = temperature.OF_SIMILARITY[name]
    tau = function(0.2) if name == 'constant' else function(0.07, 0.2)
    left.plot(s, tau(s), label=name)
  left.plot(s, temperature.exponential(0.07, 0.2, rate=-3.5)(s), '--', label='exponential, rate −3.5')
  for shift, scale in ((-0.4, 0.7), (-0.2, 0.6), (0.0, 0.5), (0.2, 0.6), (0.4, 0.7)):
    label = f'shift {shift}, scale {scale}'.replace('-', '−')
    right.plot(s, temperature.shifted_cosine(0.07, 0.2, shift, scale)(s), label=label)
  left.set(xlabel='similarity s', ylabel='temperature τ(s)', title='functions of the similarity')
  right.set(xlabel='similarity s', title='shifted_cosine')
  for axis in (left, right):
    axis.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=2)
  return figure


def penalties() -> Figure:
  """The penalty on each negative, and how evenly penalties are spread, for several temperatures."""
  s = SIMILARITIES
  figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.2), layout='constrained')
  for tau in (0.07, 0.1, 0.2, 0.3, 0.5, 1.0):
    left.plot(s, losses.penalties(s[None], tau)[0] * len(s), label=f'τ = {tau}')
  cosine = temperature.cosine(0.07, 0.2)
  left.plot(s, losses.penalties(s[None], cosine)[0] * len(s), 'k--', label='cosine, 0.07 to 0.2')
  left.set(xlabel='similarity s of a negative', ylabel='penalty, relative to the mean', ylim=(0, 12))
  left.set_xticks([-1, -0.5, 0, 0.5, 1])
  left.set_title('which negatives are pushed away')
  left.legend(fontsize=8)
  negatives = jnp.asarray(np.random.default_rng(0).normal(0, 0.25, (64, 1024)).clip(-1, 1), jnp.float32)
  grid = np.geomspace(0.05, 1.0, 40)
  right.plot(grid, [float(losses.penalty_entropy(negatives, float(tau)).mean()) for tau in grid])
  right.axhline(np.log(1024), color='grey', linestyle=':', label='uniform: log 1,024')
  right.set(xlabel='temperature τ', ylabel='entropy of the penalties', title='evenness of penalties', xscale='log')
  right.set_xticks([0.05, 0.1, 0.2, 0.5, 1.0], ['0.05', '0.1', '0.2', '0.5', '1'])
  right.legend(fontsize=8)
  return figure


def schedules() -> Figure:
  """Temperature schedules over the epochs."""
  figure, axis = plt.subplots(figsize=(6, 2.8), layout='constrained')
  epochs = np.arange(0, 201)
  for name, schedule in {
    'linear_schedule(0.07, 0.2, epochs=100)': temperature.linear_schedule(0.07, 0.2, epochs=100),
    'cosine_schedule(0.1, 1.0, period=100)': temperature.cosine_schedule(0.1, 1.0, period=100),
  }.items():
    axis.plot(epochs, [float(schedule(int(epoch))) for epoch in epochs], label=name)
  axis.set(xlabel='epoch', ylabel='temperature τ')
  axis.legend(fontsize=8, loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=2)
  return figure


def positives_and_negatives() -> Figure:
  """Which keys are positives and negatives of which queries."""
  figure, axes = plt.subplots(1, 3, figsize=(7.6, 3.4), layout='constrained')
  views, bank, own = [jnp.eye(4), jnp.eye(4)], jnp.eye(8, 4), np.array([1, 3, 4, 6])
  kinds = {
    'in_batch: 2 views of 4 images': (pairs.in_batch(*views), other_views(2, 4)),
    'with_keys: 4 queries, 4 keys': (pairs.with_keys(*views), np.arange(4)[:, None] == np.arange(4)[None]),
    'with_bank: 4 queries, 8 entries': (
      pairs.with_bank(views[0], bank, jnp.asarray(own)),
      own[:, None] == np.arange(8)[None],
    ),
  }
  for axis, (title, (found, positive)) in zip(axes, kinds.items(), strict=True):
    kind = np.where(np.asarray(found.where), 0, np.where(positive, 1, 2))
    colors = matplotlib.colors.ListedColormap(['#56B4E9', '#009E73', '#dddddd'])
    axis.imshow(kind, cmap=colors, vmin=0, vmax=2)
    axis.set_title(title, fontsize=9)
    axis.set(xlabel='keys', ylabel='queries', xticks=[], yticks=[])
    axis.grid(False)
    for k in range(kind.shape[1] + 1):
      axis.axvline(k - 0.5, color='white', linewidth=1)
    for k in range(kind.shape[0] + 1):
      axis.axhline(k - 0.5, color='white', linewidth=1)
  patches = [matplotlib.patches.Patch(color=c) for c in ('#009E73', '#56B4E9', '#dddddd')]
  figure.legend(patches, ['positive', 'negative', 'the query itself'], loc='outside lower center', ncols=3)
  return figure


def other_views(views: int, images: int) -> np.ndarray:
  """bool [V·N, V·N], True where two different views are of the same image."""
  instance, view = np.tile(np.arange(images), views), np.repeat(np.arange(views), images)
  return (instance[:, None] == instance[None]) & (view[:, None] != view[None])


FIGURES = {
  'temperatures': temperatures,
  'penalties': penalties,
  'schedules': schedules,
  'pairs': positives_and_negatives,
}
