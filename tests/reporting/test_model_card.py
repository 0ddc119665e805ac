"""An export is a model folder of the Hugging Face hub, whose card has the results of the run and no others."""

import json
import re
import sys

import huggingface_hub
import pytest
import yaml

from ssl_jax import config, train
from ssl_jax.reporting import export, model_card
from tests.helpers import tiny
from tests.test_image_text import small


def head_of(text):
  """The YAML before a README."""
  return yaml.safe_load(re.match(r'---\n(.*?)\n---\n', text, re.DOTALL)[1])


def listed(head):
  """{name: value} of all results of a card."""
  (model,) = head['model-index']
  return {metric['name']: metric['value'] for result in model['results'] for metric in result['metrics']}


@pytest.mark.slow
def test_the_card_has_the_results_and_the_command_of_the_run(tmp_path, monkeypatch):
  chosen = tiny(tmp_path, steps=4, **{'eval.at_end': True, 'eval.linear': 'ridge', 'eval.view_images': 8})
  monkeypatch.setattr(sys, 'argv', ['/home/me/main.py', '--config=a file.py', '--config.steps=4'])
  summary = train.train(chosen, tmp_path / 'run')
  chosen.eval.data.name = 'cifar10'  # as if by a flag: the results are still those of the run
  folder = export.export(chosen, str(tmp_path / 'run'))
  assert {file.name for file in folder.iterdir()} == {
    *('README.md', 'config.json', 'model.safetensors', 'projector.safetensors', 'encoder.jax')
  }
  text = (folder / 'README.md').read_text()
  head, evaluation = head_of(text), json.loads((tmp_path / 'run' / 'evaluation.json').read_text())
  assert listed(head) == {'knn5': summary['knn5'], 'linear': evaluation['linear']}
  assert 'license' not in head and '# license: ' in text
  assert f'| `knn5` | {summary["knn5"]:.2f} |' in text
  assert "python main.py '--config=a file.py' --config.steps=4\n" in text
  about = json.loads((folder / 'config.json').read_text())
  assert about['architecture'] == 'resnet_tiny' and about['model_args'] == {'width': 8, 'stage_sizes': [1]}
  assert (about['step'], about['features'], about['image_size'], len(about['mean'])) == (4, 8, 12, 3)
  assert about['run'] == json.loads((tmp_path / 'run' / 'config.json').read_text())


def test_the_hub_library_reads_the_results(tmp_path):
  """Of images with captions, whose numbers belong to several tasks."""
  results = {'zero_shot': 83.8, 'image_to_text_1': 33.0, 'text_to_image_10': 41.25, 'knn5': 50.0}
  (tmp_path / 'summary.json').write_text(json.dumps({'steps': 6, 'pairs': 64, 'seconds': 1.0, **results}))
  card = model_card.read(small('siglip'), tmp_path, 6)
  assert '&' not in card.head and '*' not in card.head  # no anchors
  found = huggingface_hub.ModelCard(card.head).data
  assert (
    found.library_name == 'ssl_jax' and found.datasets == ['embedded'] and {'image_text', 'sigmoid'} <= {*found.tags}
  )
  assert {result.metric_name: result.metric_value for result in found.eval_results} == results
  assert {result.metric_name: (result.task_type, result.metric_type) for result in found.eval_results} == {
    'zero_shot': ('zero-shot-image-classification', 'accuracy'),
    'image_to_text_1': ('image-to-text-retrieval', 'recall'),
    'text_to_image_10': ('text-to-image-retrieval', 'recall'),
    'knn5': ('image-classification', 'accuracy'),
  }
  assert all((result.dataset_name, result.dataset_split) == ('embedded', 'test') for result in found.eval_results)


def test_only_results_of_this_checkpoint_are_listed(tmp_path):
  write = lambda name, **content: (tmp_path / f'{name}.json').write_text(json.dumps(content))
  read = lambda *changes: model_card.read(config.load('configs/cifar10.py', changes), tmp_path, 6)
  assert read().results == {} and 'model-index' not in head_of(read().head) and model_card.results_section(read()) == ''
  write('summary', steps=5, knn200=70.5, command='python main.py')
  assert read().results == {} and read().command == ''
  write('summary', steps=6, knn200=70.5, knn200_pixels=30.5, command=None)
  write('evaluation', step=5, linear=80.5)
  assert read().results == {'knn200': 70.5} and read().command == ''
  write('evaluation', step=6, linear=80.5, linear_std=0.5, linear_protocol='ridge', measures={})
  write('evaluation_svhn', step=6, linear=60.5)
  assert read().results == {'knn200': 70.5, 'linear': 80.5}
  other = read('eval.data.name=svhn')  # the run was evaluated on another set from the start
  assert other.results == {'knn200': 70.5, 'linear': 60.5}
  (result, *_) = head_of(other.head)['model-index'][0]['results']
  assert result['dataset']['name'] == 'svhn' and head_of(other.head)['datasets'] == ['cifar10']


def test_a_damaged_summary_is_one_line(tmp_path):
  (tmp_path / 'summary.json').write_text('{"steps": "many"}')
  with pytest.raises(ValueError, match=r'summary\.json has a str as steps, so it is not what this program wrote'):
    model_card.read(config.load('configs/cifar10.py'), tmp_path, 6)
