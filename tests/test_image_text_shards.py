"""Training on pairs in tar shards: broken samples, interruptions in the middle of a shard, a tokenizer.json."""

import json

import chex
import numpy as np
import pytest

from configs import base, cc3m
from ssl_jax import config, train
from ssl_jax.run import builder
from tests.data.test_tar import encode, pixels, write
from tests.helpers import asked_to_stop_at, final
from tests.test_image_text import small

SHARDS = (9, 8, 11)
BROKEN = {3: 'image', 12: 'missing', 20: 'encoding'}


def settings(tmp_path, **changes):
  """28 pairs in three shards, of which three are broken in different ways; batches of 4."""
  for shard in range(len(SHARDS)):
    members = []
    for k in range(sum(SHARDS[:shard]), sum(SHARDS[: shard + 1])):
      image = encode(pixels(k, 40, 40), 'JPEG')
      members.append((f'{k:04}.jpg', image[: len(image) // 2] if BROKEN.get(k) == 'image' else image))
      if BROKEN.get(k) != 'missing':
        text = f'number {k} is {"red" if k % 2 else "blue"}'.encode()
        members.append((f'{k:04}.txt', b'\xff' + text if BROKEN.get(k) == 'encoding' else text))
    write(tmp_path / 'shards' / f'train-{shard}.tar', members)
  data = dict(source='tar', path=str(tmp_path / 'shards'), train_split='train-{0..2}.tar', broken='skip')
  nothing = {'every_epochs': 0, 'prompts': 'none', 'retrieval': 0, 'k': (), 'linear': ''}
  return {'data': data, 'batch_size': 4, 'steps': 10, 'eval': nothing, **changes}


@pytest.mark.slow
def test_training_resumes_within_a_shard_with_another_number_of_workers(tmp_path):
  """Step 8 is in the second epoch, which has 7 batches."""
  tokenizers = pytest.importorskip('tokenizers')
  rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({'-': 0, '?': 1, 'number': 2, 'is': 3, 'red': 4}, '?'))
  rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  rules.save(str(tmp_path / 'tokenizer.json'))
  changes = settings(tmp_path) | {
    **{'data.on_device': 'no', 'data.shuffle_window': 10, 'data.vocabulary': str(tmp_path / 'tokenizer.json')},
  }
  whole = small(**changes)
  summary = train.train(whole, str(tmp_path / 'whole'))
  assert summary['broken_images_skipped'] == 3 and summary['pairs'] == 28
  losses, state = final(tmp_path / 'whole', whole)
  with asked_to_stop_at(8), pytest.raises(train.Interrupted, match='stopped at step 8 of 10'):
    train.train(small(**changes), str(tmp_path / 'run'))
  other = small(**changes, **{'data.workers': 2})
  train.train(other, str(tmp_path / 'run'))
  resumed_losses, resumed = final(tmp_path / 'run', other)
  assert resumed_losses == losses and len(losses) == 10
  chex.assert_trees_all_equal(resumed, state)
  assert json.loads((tmp_path / 'run' / 'tokenizer.json').read_text())['model']['vocab']['red'] == 4


def test_pairs_in_memory_are_those_that_are_complete(tmp_path):
  run = builder.build(small(**settings(tmp_path)))
  kept = np.setdiff1d(np.arange(28), list(BROKEN))
  assert run.on_device and len(run.train) == 25 and run.steps_per_epoch == 6
  assert run.train.captions_of(np.array([3])) == [('number 4 is blue',)]
  words = run.train.vocabulary
  expected = words.encode([f'number {k} is {"red" if k % 2 else "blue"}' for k in kept], 16)
  np.testing.assert_array_equal(run.train.tokens.tokens[:, 0], expected)


def test_an_error_names_the_shard_and_the_key(tmp_path):
  changes = settings(tmp_path)
  changes['data']['broken'] = 'error'
  with pytest.raises(ValueError) as error:
    builder.build(small(**changes))
  first = f'{tmp_path}/shards/train-1.tar: 0012.jpg has no readable text (it is missing or empty): fix or remove it'
  assert str(error.value).startswith(first) and '\n' not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('variant', cc3m.VARIANTS)
def test_every_variant_of_cc3m_trains_on_shards(tmp_path, variant):
  """Two steps with its loss, temperature, optimizer, crops, and names of shards, and narrow encoders."""
  for name, numbers in (('train-0000', range(8)), ('train-0001', range(8, 16)), ('val-0000', range(16, 24))):
    members = [(f'{k:04}.jpg', encode(pixels(k, 48, 40), 'JPEG')) for k in numbers]
    members += [(f'{k:04}.txt', f'a picture with number {k}'.encode()) for k in numbers]
    write(tmp_path / f'cc3m-{name}.tar', sorted(members))
  chosen = cc3m.get_config(variant)
  changes = {
    'data': dict(path=str(tmp_path), image_size=32, tokens=8, workers=0),
    'model': dict(name='resnet50', width=8, stage_sizes=(1, 1)),
    'projector.features': (8,),
    'method.text': dict(name='clip_text', width=16, depth=1, heads=2, vocabulary=60),
    'batch_size': 8,
    'steps': 2,
    'optimizer.warmup_epochs': 0.5,
    'dtype': 'float32',
    'parallel.devices': 1,
    'log': dict(every_steps=1, tensorboard=False),
  }
  for key, value in changes.items():
    config.override(chosen, key, value)
  config.validate(chosen, base.get_config())
  summary = train.train(chosen, str(tmp_path / 'run'))
  losses, state = final(tmp_path / 'run', chosen)
  assert len(losses) == 2 and np.isfinite(losses).all() and summary['pairs'] == 16
  assert 0 <= summary['image_to_text_1'] <= 100 and summary['broken_images_skipped'] == 0
  started = builder.build(chosen).initial_state().params
  for part in ('encoder', 'projector', 'text'):
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(started['network'][part], state.params['network'][part])
  assert ('loss' in state.params) == (variant == 'siglip')
  assert bool(state.params['temperature']) == (variant in ('clip', 'siglip'))
