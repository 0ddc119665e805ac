"""Small versions of `python -m tests.chaos` and `python -m tests.soak`."""

import pytest

from tests import chaos, soak


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_has_the_bits_of_a_quiet_one():
  counts = chaos.chaos(kills=4, seed=1)
  assert counts['runs'] >= 1 and sum(counts[moment] for moment in chaos.MOMENTS) == 4


@pytest.mark.slow
def test_memory_files_and_threads_do_not_grow():
  soak.check(steps=300)


def test_growth_is_that_of_the_last_third():
  usage = lambda files: soak.Usage(memory=100.0, files=files, threads=1, python_threads=1, children=0)
  assert soak.growth([usage(n) for n in (1, 50, 50, 50, 49, 50)]).files == 0
  assert soak.growth([usage(n) for n in (50, 50, 50, 51, 52, 53)]).files == 2
