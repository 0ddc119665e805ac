"""The analytical figures show what the papers say about them."""

import numpy as np
import pytest

from experiments import analysis

S = analysis.similarities()


def test_the_solutions_fall_to_zero_and_rise_again_between_their_ends():
  """DySTreSS sec. 3.4: negative slope for s < 0, positive for s > 0, tau_max at both ends."""
  curves = analysis.ode_solutions(S)
  for (_, tau_max), tau in zip(analysis.SOLUTIONS, curves.values(), strict=True):
    np.testing.assert_allclose(tau[[0, -1]], tau_max, rtol=1e-4)
    left, right = tau[S < 0], tau[S > 0]
    assert np.all(left > 0) and np.all(right > 0)
    assert np.all(np.diff(left) < 0) and np.all(np.diff(right) > 0)


def test_every_temperature_stays_in_its_range_and_ends_at_its_highest():
  ranges = analysis.temperature_ranges(S)
  for (low, high), tau in zip(analysis.RANGES, ranges.values(), strict=False):
    assert tau.min() == pytest.approx(low) and tau.max() == pytest.approx(high)
    assert low == high or S[tau.argmin()] == pytest.approx(0, abs=1e-6)
  for tau in analysis.shifted_temperatures(S).values():
    np.testing.assert_allclose(tau[[0, -1]], 0.2, rtol=1e-5)
    assert tau.min() == pytest.approx(0.1, rel=1e-3)


def test_a_lower_temperature_punishes_the_hardest_negatives_more():
  curves = analysis.penalties(S)
  hardest = [r[-1] for r in curves.values()][: len(analysis.TEMPERATURES)]
  assert hardest == sorted(hardest, reverse=True)
  for r in curves.values():
    assert r.sum() == pytest.approx(1, rel=1e-4)


def test_the_command_writes_four_figures(tmp_path):
  for path in analysis.main(tmp_path):
    assert path.read_text().count('<path') > 5
  assert len(list(tmp_path.glob('*.svg'))) == 4
