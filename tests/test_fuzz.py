"""A sample of `python -m tests.fuzz`: every config of the space ends in a run or in one line."""

import random

import pytest

from tests import fuzz

pytestmark = pytest.mark.slow  # it builds hundreds of runs


@pytest.mark.slow
def test_every_random_config_ends_in_a_run_or_in_one_line():
  counts, failures = fuzz.fuzz(cases=300, seed=1)
  assert not failures, '\n'.join(failures)
  assert min(counts['valid'], counts['refused']) > 30  # neither end is out of reach


def test_the_space_has_every_section_and_every_key():
  changed = {key for number in range(3000) for key, _ in fuzz.case(random.Random(number))}
  flat = fuzz.config.flatten(fuzz.base.get_config())
  assert set(flat) <= changed
  names = {
    (key, value) for number in range(6000) for key, value in fuzz.case(random.Random(number)) if isinstance(value, str)
  }
  for section, table in fuzz.TABLES.items():
    assert {(f'{section}.name', name) for name in table} <= names


def test_a_case_is_made_again_by_its_number():
  assert repr(fuzz.case(random.Random('0/7'))) == repr(fuzz.case(random.Random('0/7')))
