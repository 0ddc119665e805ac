"""--mode=transfer: an encoder, a list of sets, one table; finished sets are not repeated."""

import json
import pathlib
import sys
import types

import numpy as np
import pytest
from PIL import Image

from ssl_jax import train
from ssl_jax.config import load
from ssl_jax.data import tfds_source
from ssl_jax.evals import few_shot, transfer
from tests.helpers import REAL, call, needs_real_data, tiny

SHORT = few_shot.Protocol(
  search_epochs=2, epochs=4, batch=8, learning_rates=(1e-3, 0.1), decays=(-6.0, 0.0, 3), first=2, then=(1,)
)


def folder(root, classes, train_images=6, test_images=4, seed=0, splits=('train', 'test')):
  """Images of one color per class, with noise, in class folders."""
  rng = np.random.default_rng(seed)
  for c in range(classes):
    color = rng.integers(40, 216, 3)
    for split, count in zip(splits, (train_images, test_images), strict=False):
      place = root / split / f'class{c}'
      place.mkdir(parents=True)
      for k in range(count):
        pixels = np.clip(color + rng.normal(0, 12, (14, 12, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f'{k}.png')
  return root


def several_labels(root, seed=0):
  """Images whose red, green and blue halves are their labels, with labels.csv in each split."""
  rng = np.random.default_rng(seed)
  for split, count in (('train', 24), ('test', 12)):
    (root / split).mkdir(parents=True)
    lines = []
    for k in range(count):
      has = rng.random(3) < 0.5
      has[k % 3] = True
      pixels = np.where(has, 200, 40) + rng.normal(0, 10, (12, 12, 3))
      Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / split / f'{k}.png')
      lines.append(','.join([f'{k}.png', *(name for name, h in zip(('red', 'green', 'blue'), has, strict=True) if h)]))
    (root / split / 'labels.csv').write_text('\n'.join(lines) + '\n')
  return root


@pytest.fixture
def chosen(tmp_path):
  return tiny(tmp_path)


def test_arguments_name_sets_folders_and_metrics(chosen):
  known = transfer.parse('food101', chosen)
  assert known.metric == 'accuracy' and known.data['name'] == 'food101' and known.data['test_split'] == 'validation'
  assert transfer.parse('caltech101', chosen).metric == 'mean_per_class'
  assert transfer.parse('voc2007', chosen)[1:] == ('map', transfer.parse('voc/2007:map', chosen).data)
  birds = transfer.parse('/data/birds/:mean_per_class', chosen)
  assert (birds.name, birds.metric, birds.data['source'], birds.data['path']) == (
    *('birds', 'mean_per_class', 'folder', '/data/birds/'),
  )
  other = chosen.copy_and_resolve_references()
  other.data.update(train_split='train[:50]', test_split='val', held_out=0.0)  # of the run's own set, not of birds
  assert transfer.parse('/data/birds/:mean_per_class', other) == birds
  memes = transfer.parse('hateful_memes=/data/memes', chosen)
  assert (memes.name, memes.metric, memes.data['path']) == ('hateful_memes', 'roc_auc', '/data/memes')
  assert transfer.parse('imagenette', chosen).data['name'] == 'imagenette', 'any tfds set'
  with pytest.raises(
    ValueError, match=r"'fer2013' is not a set of tfds: give its folder, such as fer2013=/data/fer2013"
  ):
    transfer.parse('fer2013', chosen)
  with pytest.raises(ValueError, match="'=/data' is not a set: give NAME, FOLDER or NAME=FOLDER"):
    transfer.parse('=/data', chosen)
  with pytest.raises(ValueError, match="names the metric 'accurcy', which does not exist: did you mean 'accuracy'"):
    transfer.parse('food101:accurcy', chosen)


def test_table_6_has_twenty_sets_each_with_its_metric():
  assert len(transfer.ELEVATER) == 20
  metrics = [known.metric for known in transfer.ELEVATER.values()]
  counts = {name: metrics.count(name) for name in set(metrics)}
  assert counts == {'accuracy': 14, 'mean_per_class': 4, 'roc_auc': 1, 'map': 1}
  per_class = {name for name, known in transfer.ELEVATER.items() if known.metric == 'mean_per_class'}
  assert per_class == {'caltech101', 'fgvc_aircraft', 'oxford_flowers102', 'oxford_iiit_pet'}


def test_sets_without_a_test_split_in_tfds_have_the_sizes_of_elevater():
  size = lambda split: int(split[:-1].partition(':')[2]) - int(split.partition('[')[2].partition(':')[0] or 0)
  sizes = {name: tuple(map(size, transfer.ELEVATER[name][2:])) for name in ('eurosat', 'resisc45')}
  assert sizes == {'eurosat': (5000, 5000), 'resisc45': (3150, 25200)}


def test_a_class_may_occur_only_in_the_test_images():
  assert transfer.Opened(None, None, np.array([0, 1]), np.array([0, 3])).classes == 4


def test_scores_are_those_of_readable_test_images(monkeypatch):
  test = types.SimpleNamespace(readable=lambda: np.array([0, 2]))
  data = transfer.Opened(None, test, np.array([0, 1]), np.array([1, 0, 0]))
  logits = np.array([[0.0, 1.0], [1.0, 0.0]])
  fits = lambda *given: iter([(0, few_shot.Chosen(0.1, 1e-3, 75.0), logits)])
  monkeypatch.setattr(transfer, '_fits', fits)
  found = transfer._evaluate(None, data, 'accuracy', 'linear', SHORT, [0], lambda text: None)
  expected = {'mean': 100.0, 'std': None, 'seeds': [100.0], 'held_out': [75.0]}
  assert found == {**expected, 'learning_rate': [0.1], 'weight_decay': [1e-3]}


def test_without_sets_it_transfers_to_those_in_tfds(tmp_path, monkeypatch, capsys):
  opened = []
  monkeypatch.setattr(transfer, 'open_set', lambda target: opened.append(target.data['name']) or sys.exit())
  with pytest.raises(SystemExit):
    transfer.transfer(tiny(tmp_path, init='random'), tmp_path / 'run')
  said = capsys.readouterr().out
  assert 'transfer: to 13 sets of ELEVATER; these need folders: country211, fer2013' in said and len(opened) == 1


def test_labels_that_do_not_fit_the_metric_are_refused(tmp_path, chosen):
  colors, both = folder(tmp_path / 'colors', 3, 2, 2), several_labels(tmp_path / 'both')
  for argument, message in (
    (f'{colors}:map', r"transfer to 'colors': metric 'map' does not apply to one label per image: append :accuracy"),
    (str(both), r"transfer to 'both': metric 'accuracy' does not apply to several labels per image: append :map"),
    (f'{colors}:roc_auc', r"transfer to 'colors': roc_auc is for two classes, and it has 3"),
    (str(tmp_path / 'nowhere'), r"transfer to 'nowhere': .* is not a folder"),
  ):
    with pytest.raises(ValueError, match=message):
      transfer.open_set(transfer.parse(argument, chosen))
  (both / 'train' / 'labels.csv').write_text('0.png,red\n')
  with pytest.raises(ValueError, match=r'labels.csv has no line for 1.png \(images without one: 23\): add it'):
    transfer.open_set(transfer.parse(f'{both}:map', chosen))


def test_several_labels_of_a_folder_are_numbered_over_both_splits(tmp_path, chosen):
  opened = transfer.open_set(transfer.parse(f'{several_labels(tmp_path / "both")}:map', chosen))
  assert opened.classes == 3 and opened.train_targets.shape == (24, 3)
  first = opened.train.multi_labels()[0]
  assert sorted(first) == sorted(np.array(['blue', 'green', 'red'])[opened.train_targets[0]])


def test_several_labels_of_a_tfds_set_are_read_from_its_records():
  """As tfds stores VOC: a sequence of classes per image, in which a class may be repeated."""
  from tensorflow_datasets.proto import tf_example_pb2

  class Records(list):
    def __getitems__(self, positions):
      return [self[k] for k in positions]

  def record(*labels):
    example = tf_example_pb2.Example()
    example.features.feature['labels'].int64_list.value.extend(labels)
    return example.SerializeToString()

  source = tfds_source.Tfds(Records([record(2, 0, 2), record(1)]), 'voc', False, (), 'error')
  assert source.multi_labels() is None
  source.label_names = ('cat', 'dog', 'horse')
  assert source.multi_labels() == [['cat', 'horse'], ['dog']]
  assert source.subset(np.array([1])).multi_labels() == [['dog']]


@pytest.mark.parametrize('kind', transfer.KINDS)
def test_shots_that_cannot_be_read_are_left_out(tmp_path, monkeypatch, kind):
  """Black and white images; the last black one is broken, and a white one follows it."""
  root = folder(tmp_path / 'two', 2, train_images=5)
  for file in root.rglob('*.png'):
    Image.new('RGB', (12, 12), ('black', 'white')[file.parent.name == 'class1']).save(file)
  (root / 'train' / 'class0' / '4.png').write_bytes(b'no image')
  config, calls = tiny(tmp_path, init='random', **{'data.broken': 'skip'}), []
  data, encoder = transfer.open_set(transfer.parse(str(root), config)), transfer.encoder_of(config, tmp_path / 'run')
  monkeypatch.setattr(few_shot, 'choose', lambda model, *given: calls.append(given) or few_shot.Chosen(0.1, 1e-3, 0.0))
  draw, fit, used = few_shot.draw, few_shot.train, []
  monkeypatch.setattr(few_shot, 'draw', lambda *given: used.append(given[1:]) or draw(*given))
  monkeypatch.setattr(
    few_shot, 'train', lambda *given, **named: used.append((*given[3:], named)) or fit(*given, **named)
  )
  next(transfer._fits(encoder, data, transfer.METRICS['accuracy'], kind, SHORT, [3]))
  ((inputs, targets, *rest),) = calls
  assert rest == [transfer.METRICS['accuracy'], SHORT, 3]
  assert used == [(5, 3), ([(0.1, 1e-3)], dict(epochs=4, batch=8, seed=3))]
  assert targets.tolist() == [0] * 4 + [1] * 5 and len(inputs) == 9
  assert np.ptp(inputs[targets == 0].std(axis=0)) == 0, 'all are alike'
  assert not np.allclose(inputs[3], inputs[4])


def test_only_results_of_the_same_weights_and_images_are_reused(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(transfer, '_evaluate', lambda *given: {'mean': 50.0, 'std': None})
  places = [folder(tmp_path / name, 2, 2, 2) for name in ('a', 'b')]

  def run(name, place, **changes):
    config = tiny(tmp_path, **{'init': 'random', **changes})
    found = transfer.transfer(config, tmp_path / 'run', [f'{name}={place}'])
    return set(found['sets']), capsys.readouterr().out.count('done before')

  assert run('birds', places[0]) == ({'birds'}, 0)
  assert run('birds', places[0]) == ({'birds'}, 2)
  assert run('birds', places[1]) == ({'birds'}, 0)
  Image.new('RGB', (9, 9)).save(next(places[1].glob('test/*/*.png')))
  assert run('birds', places[1]) == ({'birds'}, 0), 'other images under the same names'
  assert run('birds', places[1]) == ({'birds'}, 2)
  assert run('fish', places[0]) == ({'birds', 'fish'}, 0)
  assert run('fish', places[0], seed=1) == ({'fish'}, 0)
  assert run('fish', places[0], seed=1, **{'model.width': 4}) == ({'fish'}, 0)
  (tmp_path / 'run' / 'transfer.md').unlink()  # as if it had been killed before it wrote the table
  assert run('fish', places[0], seed=1, **{'model.width': 4}) == ({'fish'}, 2)
  assert '| fish | accuracy | 50.0 | 50.0 |' in (tmp_path / 'run' / 'transfer.md').read_text()
  for changes in ({'dtype': 'bfloat16'}, {'data.image_size': 16}, {'eval.crop': 0.75}):
    run('fish', places[0], seed=1, **{'model.width': 4})
    assert run('fish', places[0], seed=1, **{'model.width': 4}, **changes) == ({'fish'}, 0)
  for content, message in (('{}', 'has no sets'), ('{"sets": {"fish": 1}}', 'has a int as fish')):
    (tmp_path / 'run' / 'transfer.json').write_text(content)
    with pytest.raises(ValueError, match=rf'transfer\.json {message}, so it is not what this program wrote'):
      run('fish', places[0])


def test_two_processes_add_to_the_same_table(tmp_path, monkeypatch):
  places = [f'{name}={folder(tmp_path / name, 2, 2, 2)}' for name in ('a', 'b')]
  config, entry = tiny(tmp_path, init='random'), {'mean': 50.0, 'std': None}
  run = lambda place: transfer.transfer(config, tmp_path / 'run', [place])

  def interfered(*given):
    monkeypatch.setattr(transfer, '_evaluate', lambda *given: entry)
    run(places[1])
    return entry

  monkeypatch.setattr(transfer, '_evaluate', interfered)
  assert run(places[0])['sets'].keys() == {'b', 'a'}
  table = (tmp_path / 'run' / 'transfer.md').read_text()
  assert '| a | accuracy | 50.0 | 50.0 |' in table and '| b | accuracy | 50.0 | 50.0 |' in table


def test_an_encoder_of_sentences_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"^model\.name = 'bert_base' encodes sentences: --mode=transfer is for images$"):
    transfer.encoder_of(load('configs/sentences.py'), tmp_path)


@pytest.mark.slow
def test_from_a_run_to_the_table_and_again(tmp_path, capsys):
  """Three sets with their metrics; a set that is finished is not trained again, a new one is added to the table."""
  config = tiny(tmp_path, steps=4, **{'eval.crop': 0.75, 'parallel.devices': 2})
  workdir = tmp_path / 'run'
  train.train(config, workdir)
  (tmp_path / 'data.npz').unlink()  # the images of the run are not needed
  two, many = folder(tmp_path / 'two', 2, splits=('all',)), folder(tmp_path / 'many', 4, seed=1)
  first = [f'{two / "all"}:roc_auc', f'{several_labels(tmp_path / "both")}:map']
  found = transfer.transfer(config, workdir, first, SHORT)
  assert found['sets'].keys() == {'all', 'both'}
  for entry in found['sets'].values():
    for kind in ('linear', 'finetune'):
      assert len(entry[kind]['seeds']) == 3 and entry[kind]['std'] is not None
      assert entry[kind]['learning_rate'][0] in SHORT.learning_rates
      assert entry[kind]['mean'] > 60, 'colors are easy'
  capsys.readouterr()
  found = transfer.transfer(config, workdir, [*first, f'{many}:mean_per_class'], SHORT)
  said = capsys.readouterr().out
  assert said.count('done before') == 4 and 'many (3 of 3), linear: seed 2' in said
  assert json.loads((workdir / 'transfer.json').read_text()) == found
  lines = (workdir / 'transfer.md').read_text().splitlines()
  assert lines[0] == '| set | metric | fine-tuned | linear |'
  named = [line.split(' | ')[:2] for line in lines[2:5]]
  assert named == [['| all', 'roc_auc'], ['| both', 'map'], ['| many', 'mean_per_class']]
  assert lines[5].startswith('| mean | | ') and ' ± ' in lines[2]
  assert found['mean']['linear'] == pytest.approx(np.mean([e['linear']['mean'] for e in found['sets'].values()]))
  other = few_shot.dataclasses.replace(SHORT, epochs=5)
  transfer.transfer(config, workdir, [first[0]], other)
  assert 'done before' not in capsys.readouterr().out, 'another protocol'


@pytest.mark.slow
def test_an_interrupted_set_keeps_what_is_finished(tmp_path, monkeypatch):
  config = tiny(tmp_path, init='random', **{'eval.seeds': (4, 5)})
  place, workdir = str(folder(tmp_path / 'two', 2)), tmp_path / 'random'
  evaluate = transfer._evaluate

  def interrupted(encoder, data, metric, kind, *rest):
    if kind == 'linear':
      raise KeyboardInterrupt
    return evaluate(encoder, data, metric, kind, *rest)

  monkeypatch.setattr(transfer, '_evaluate', interrupted)
  with pytest.raises(KeyboardInterrupt):
    transfer.transfer(config, workdir, [place], SHORT)
  stored = json.loads((workdir / 'transfer.json').read_text())
  assert len(stored['sets']['two']['finetune']['seeds']) == 2 and stored['mean']['linear'] is None
  monkeypatch.setattr(transfer, '_evaluate', evaluate)
  found = transfer.transfer(config, workdir, [place], SHORT)
  assert found['sets']['two']['finetune'] == stored['sets']['two']['finetune']
  assert found['sets']['two']['linear']['mean'] > 60


def test_mistakes_on_the_command_line_end_in_one_line(tmp_path):
  place = folder(tmp_path / 'two', 2, 2, 2)
  arguments = ['--mode=transfer', f'--workdir={tmp_path / "none"}']
  assert 'does not hold a run' in call(*arguments, '--config=', str(place))
  more = ['--config=configs/quickstart.py', '--config.init=random', '--config.parallel.cpu_devices=1']
  assert "'two' is given twice" in call(*arguments, *more, str(place), str(place))
  assert "'fgvc_aircraft' is not a set of tfds" in call(*arguments, *more, 'fgvc_aircraft')
  assert "'--x' is not a flag" in call(*arguments, *more, '--x')


@needs_real_data
@pytest.mark.slow
def test_photographs_are_told_apart(tmp_path):
  """Imagenette, by a random encoder: better than chance, and each part of the table is there."""
  config = tiny(tmp_path, init='random', **{'data.image_size': 32, 'eval.batch_size': 200})
  root = tmp_path / 'imagenette'
  for split in ('train', 'val'):
    (root / split).mkdir(parents=True)
    for label in sorted((pathlib.Path(REAL) / 'imagenette' / split).iterdir())[:3]:
      (root / split / label.name).mkdir()
      for image in sorted(label.iterdir())[:40]:
        (root / split / label.name / image.name).symlink_to(image)
  found = transfer.transfer(config, tmp_path / 'run', [str(root)], SHORT)
  assert found['sets']['imagenette']['linear']['mean'] > 100 / 3
