"""The papers' figures that need no training, redrawn.

  python -m experiments.analysis

writes experiments/figures/*.svg: temperature functions (DySTreSS, Fig. 3 and 4), the solutions of its differential
equation (Fig. 2), and the penalty on a negative against its similarity (Wang & Liu 2021, Fig. 3).
"""

import argparse
import itertools
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from ssl_jax import losses, temperature
from ssl_jax.reporting import figures

FOLDER = pathlib.Path(__file__).parent / 'figures'
# (tau_min, tau_max) of DySTreSS Table 14 and, the last two, of A.3
RANGES = ((0.07, 0.1), (0.07, 0.2), (0.1, 0.2), (0.07, 0.5), (0.2, 0.5), (0.2, 0.2))
SHIFTS = ((0.0, 0.5), (0.2, 0.6), (0.4, 0.7), (-0.2, 0.6), (-0.4, 0.7))  # (shift, scale), DySTreSS Table 15
# (delta K, tau_max); tau_max gives the integral constant. At s = −1 the slope is negative only if
# delta K < exp(−1 / tau_max) / tau_max (Eq. 13).
SOLUTIONS = (*itertools.product((0.005, 0.03), (0.2, 0.3, 0.5)), (0.15, 0.5), (0.25, 0.5))
TEMPERATURES = (0.07, 0.1, 0.2, 0.3, 0.5, 1.0)
POINTS = 401


def similarities() -> np.ndarray:
  """The x axis of all figures.  -> [POINTS]"""
  return np.linspace(-1, 1, POINTS, dtype=np.float32)


def temperature_ranges(s: np.ndarray) -> dict[str, np.ndarray]:
  """The cosine functions of DySTreSS Alg. 1 (Fig. 3), and the other shapes of Table 10 and App. C."""
  curves = {f'cosine, {low} to {high}': temperature.cosine(low, high) for low, high in RANGES}
  curves |= {f'{f.__name__}, 0.07 to 0.2': f(0.07, 0.2) for f in (temperature.linear, temperature.exponential)}
  curves['monotonic cosine, 0.07 to 0.2'] = temperature.monotonic_cosine(0.07, 0.2)
  return {name: np.asarray(tau(jnp.asarray(s))) for name, tau in curves.items()}


def shifted_temperatures(s: np.ndarray) -> dict[str, np.ndarray]:
  """The shifted functions of DySTreSS Alg. 2, from 0.1 to 0.2 (Fig. 4)."""
  tau = lambda shift, scale: temperature.shifted_cosine(0.1, 0.2, shift, scale)(jnp.asarray(s))
  label = lambda shift, scale: f'shift {shift:g}, scale {scale:g}'.replace('-', '−')
  return {label(*pair): np.asarray(tau(*pair)) for pair in SHIFTS}


def ode_solutions(s: np.ndarray) -> dict[str, np.ndarray]:
  """tau = s / log(delta K s − c) (DySTreSS Eq. 14, Fig. 2), with tau(±1) = tau_max: one constant c per half."""
  curves = {}
  for dk, tau_max in SOLUTIONS:
    constants = {-1: -dk - math.exp(-1 / tau_max), 1: dk - math.exp(1 / tau_max)}
    halves = [temperature.ode_solution(1.0, dk, constants[side])(jnp.asarray(s)) for side in (-1, 1)]
    # At s = 0 the formula is undefined; its limit is 0.
    curves[f'δK = {dk}, τ(±1) = {tau_max}'] = np.where(s == 0, np.nan, np.where(s < 0, *map(np.asarray, halves)))
  return curves


def penalties(s: np.ndarray) -> dict[str, np.ndarray]:
  """Relative penalties on negatives with evenly spaced similarities (Wang & Liu 2021, Fig. 3, with DySTreSS added)."""
  own = temperature.cosine(0.07, 0.2)
  curves = {f'τ = {tau}': losses.penalties(jnp.asarray(s)[None], tau)[0] for tau in TEMPERATURES}
  curves['τ(s), cosine, 0.07 to 0.2'] = losses.penalties(jnp.asarray(s)[None], own)[0]
  return {name: np.asarray(r) for name, r in curves.items()}


def main(folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
  """Draws all figures and returns their files."""
  s = similarities()
  tau = dict(xlabel='cosine similarity s', ylabel='temperature τ', xlim=(-1, 1))
  drawn = {
    'temperature_ranges': figures.lines(s, temperature_ranges(s), **tau),
    'temperature_shifts': figures.lines(s, shifted_temperatures(s), **tau),
    'ode_solutions': figures.lines(s, ode_solutions(s), **tau),
    'penalties': figures.lines(
      s, penalties(s), xlabel='similarity of the negative', ylabel='relative penalty r', xlim=(-1, 1)
    ),
  }
  folder.mkdir(parents=True, exist_ok=True)
  paths = []
  for name, figure in drawn.items():
    paths.append(folder / f'{name}.svg')
    figures.write_svg(figure, paths[-1])
  return paths


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('folder', nargs='?', type=pathlib.Path, default=FOLDER, help='where to write')
  print('\n'.join(map(str, main(parser.parse_args().folder))))
