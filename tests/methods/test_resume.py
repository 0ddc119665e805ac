"""A run with extra state is bit-identical after an interruption."""

import chex
import pytest

from ssl_jax import train
from tests.helpers import asked_to_stop_at, final, tiny

pytestmark = pytest.mark.slow  # it trains every method that has a state

NONE, TENTH = dict(name='none'), dict(name='constant', tau=0.1)
STATES = {
  'queue': ({'method': dict(name='moco', queue=64, momentum=0.9)}, {'momentum', 'queue', 'pointer', 'keys'}),
  'bank_average_and_probe': (
    {'method': dict(name='memory_bank', negatives=9), 'ema': 0.9, 'online_probe': 0.01},
    {'bank', 'average', 'probe'},
  ),
  'centre': (
    {'method': dict(name='dino'), 'loss': dict(name='dino'), 'temperature': TENTH},
    {'momentum', 'centre'},
  ),
  'prototypes_and_small_crops': (
    {
      'method': dict(name='swav', predictor=dict(number=6), queue=64, queue_epochs=0),
      'loss': dict(name='swav'),
      'temperature': TENTH,
      'small_crops': dict(number=1, size=8),
    },
    {'queue', 'pointer', 'keys'},
  ),
}


@pytest.mark.parametrize('name', STATES)
def test_interrupted_and_resumed_is_bit_identical(name, tmp_path):
  changes, extra = STATES[name]
  chosen = tiny(tmp_path, **changes, steps=5, **{'parallel.devices': 2, 'eval.k': ()})
  train.train(chosen, tmp_path / 'whole')
  with asked_to_stop_at(3), pytest.raises(train.Interrupted):
    train.train(chosen, tmp_path / 'parts')
  train.train(chosen, tmp_path / 'parts')
  (losses, state), (other_losses, other) = (final(tmp_path / part, chosen) for part in ('whole', 'parts'))
  assert state.extra.keys() == extra
  assert other_losses == losses
  chex.assert_trees_all_equal(other, state)
