"""Every table and figure of the papers: what it shows, the runs that belong to it, its command and its status.

The rows of the sweeps name the tables and figures they belong to (`Row.shows`). This file adds those that need no run.
docs/generate.py builds the page "Reproducing the papers" from it. To print that page:

  python -m experiments.papers
"""

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import tables
from experiments.tables import Row, Sweep
from ssl_jax import config

FOLDER = pathlib.Path(__file__).parent
ANALYSIS = 'python -m experiments.analysis'

# HERE: data that was available for our results, by its name in a config. ELSEWHERE: data that was not. WEIGHTS:
# pretrained weights that were not available, by their folder.
HERE = ('cifar10', 'cifar100', 'sentences')
ELSEWHERE = {
  'imagenet': 'ImageNet-1K',
  'imagenet100': 'ImageNet-1K',
  'svhn_cropped': 'SVHN',
  'stl10': 'STL-10',
  'webvision': 'WebVision',
  'imagenet22k': 'ImageNet-22K',
  'mura': 'MURA',
  'chaoyang': 'Chaoyang',
  'isic2016': 'ISIC 2016',
  'mhist': 'MHIST',
  'oxford_flowers102': 'Flowers',
}
WEIGHTS = {'text': 'the weights of BERT', 'encoders': 'encoders pretrained on ImageNet-1K'}


@dataclasses.dataclass(frozen=True)
class Item:
  """A table or figure."""

  name: str
  about: str
  command: str = ''  # draws or measures it, from its runs if it has any
  drawn: str = ''  # the file in experiments/ that the command writes, if it needs no runs
  needs: str = ''  # data that the command needs, if it was not available
  nothing: str = ''  # why there is nothing to run
  status: str = ''  # if neither rows nor files tell it


@dataclasses.dataclass(frozen=True)
class Paper:
  """A paper, the folders of its sweeps, and all of its tables and figures."""

  title: str
  sweeps: Sequence[str]
  items: Sequence[Item]


def concept(name: str, about: str) -> Item:
  return Item(name, about, nothing='an illustration')


DYSTRESS = 'python -m experiments.dystress.figures'
BEHAVIOUR = 'python -m experiments.behaviour.figures'
BALANCED = 'python -m experiments.balanced.figures'
CACR = 'python -m experiments.cacr.figures'
SAMPLES = 'python -m experiments.cacr.samples'
POSITIVES = 'python -m benchmarks.positives'
ALL_POSITIVES = f'{POSITIVES} --table=17 --methods=all'
CLIP = 'python main.py --config=configs/cc3m.py:cacr --config.data.path=DIR'
EXPORT = 'python main.py --mode=export --workdir=WORKDIR'
# The figure needs the weights of a run, which are not in this repository.
NOT_DRAWN = 'ready: the runs are done, the figure is not drawn'
PART = '3 of 8 losses run: benchmarks/README.md'
PAPERS = {
  'dystress': Paper(
    'Manna et al. 2024, Dynamically Scaled Temperature in Self-Supervised Contrastive Learning (DySTreSS)',
    ('dystress', 'long_tail', 'dystress_imagenet', 'fine_tuning', 'sentences'),
    (
      Item('Table 1', 'linear accuracy on ImageNet-100'),
      Item('Table 2', 'linear accuracy on ImageNet-1K'),
      Item('Table 3', 'kNN accuracy on CIFAR-10 and CIFAR-100'),
      Item('Table 4', "CIFAR-LT against Kukleva's schedule, 2,000 epochs"),
      Item('Table 5', "ImageNet-100-LT against Kukleva's schedule"),
      Item('Table 6', 'CIFAR-10-LT'),
      Item('Table 7', 'CIFAR-100-LT'),
      Item('Table 8', 'methods without negatives on ImageNet-100, 400 epochs'),
      Item('Table 9', 'DINO and W-MSE on CIFAR'),
      Item('Table 10', 'shapes of the temperature function'),
      Item('Table 11', 'fine-tuning on medical and natural images'),
      Item('Table 12', 'sentence embeddings: similarity and transfer'),
      Item('Table 13', 'uniformity and inter-class uniformity (its alignment is left out: experiments/dystress)'),
      Item('Table 14', 'temperature ranges on ImageNet-100'),
      Item('Table 15', 'shifted temperatures on ImageNet-100'),
      Item('Table 16', 'monotonic temperature'),
      Item('Figure 1', 'similarities before and after training', DYSTRESS),
      Item('Figure 2', 'solutions of the differential equation', ANALYSIS, 'figures/ode_solutions.svg'),
      Item('Figure 3', 'temperature functions', ANALYSIS, 'figures/temperature_ranges.svg'),
      Item('Figure 4', 'shifted temperature functions', ANALYSIS, 'figures/temperature_shifts.svg'),
      Item('Figure 5', 'uniformity and tolerance by temperature range, ImageNet-100', DYSTRESS),
      Item('Figure 6', 'temperature ranges on CIFAR', DYSTRESS),
      Item('Figure 7', 'shifted temperatures on CIFAR', DYSTRESS),
      Item('Figure 8', 'learning rates on CIFAR', DYSTRESS),
    ),
  ),
  'behaviour': Paper(
    'Wang & Liu 2021, Understanding the Behaviour of Contrastive Loss, and its supplement',
    ('behaviour',),
    (
      Item('Table 1', 'accuracy, uniformity and tolerance on four datasets'),
      Item('Equation 6', 'training with the triplet limit'),
      concept('Figure 1', 'two embeddings with the same loss'),
      Item('Figure 2', 't-SNE at τ = 0.07 and 0.2', 'python -m experiments.behaviour.tsne', status=NOT_DRAWN),
      Item('Figure 3', 'penalty against similarity', ANALYSIS, 'figures/penalties.svg'),
      Item('Figure 4', 'uniformity against τ', BEHAVIOUR),
      Item('Figure 5', 'tolerance against τ', BEHAVIOUR),
      Item('Figure 6', 'uniformity against τ, hard loss', BEHAVIOUR),
      Item('Figure 7', 'tolerance against τ, hard loss', BEHAVIOUR),
      Item('Figure 8', 'local separation, CIFAR-100', BEHAVIOUR),
      Item('Figure 9', 'accuracy against τ', BEHAVIOUR),
      Item('Supplement, Table 1', 'accuracy at all temperatures'),
      Item('Supplement, Table 2', 'accuracy at all temperatures, hard loss'),
      Item('Supplement, Table 3', 'the classes of ImageNet-100', nothing='`data.classes=imagenet100`'),
      Item('Supplement, Figure 1', 'local separation, CIFAR-10', BEHAVIOUR),
      Item('Supplement, Figure 2', 'local separation, SVHN', BEHAVIOUR),
      Item('Supplement, Figure 3', 'local separation, ImageNet-100', BEHAVIOUR),
      Item('Supplement, Figure 4', 'local separation, hard loss, CIFAR-10', BEHAVIOUR),
      Item('Supplement, Figure 5', 'local separation, hard loss, CIFAR-100', BEHAVIOUR),
      Item('Supplement, Figure 6', 'local separation, hard loss, SVHN', BEHAVIOUR),
      Item('Supplement, Figure 7', 'local separation, hard loss, ImageNet-100', BEHAVIOUR),
    ),
  ),
  'cacr': Paper(
    'Zheng et al. 2023, Contrastive Attraction and Contrastive Repulsion for Representation Learning (CACR)',
    ('cacr', 'cacr_imagenet'),
    (
      Item('Table 1', 'the losses compared', nothing='a description of the losses'),
      Item('Table 2', 'linear accuracy on CIFAR, also with imbalanced classes'),
      Item('Table 3', 'twice the epochs for one positive'),
      Item('Table 4', 'linear accuracy on ImageNet-1K'),
      Item('Table 5', 'pretraining on WebVision and ImageNet-22K'),
      Item(
        'Table 6',
        'few-shot transfer to the sets of ELEVATER: `--mode=transfer` on both encoders, then this',
        'python -m experiments.cacr_imagenet.transfer',
      ),
      Item('Table 7', 'detection and segmentation: export of the encoders, then detectron2', EXPORT),
      Item('Table 8', 'linear accuracy on CIFAR and STL-10'),
      Item('Table 9', 'ResNet-50 on small images'),
      Item('Table 10', 'weights that prefer near or far samples'),
      Item('Table 11', 'uniform weights'),
      Item('Table 12', 'values of t⁺'),
      Item('Table 13', 'values of t⁻'),
      Item('Table 14', 'time and memory per step by K', POSITIVES, '../benchmarks/README.md'),
      Item('Table 15', 'contrastive losses on MoCo v2, ImageNet'),
      Item('Table 16', 'ImageNet-1K by number of epochs'),
      Item('Table 17', 'time and memory per step by loss, MoCo v2', ALL_POSITIVES, status=PART),
      Item('Table 18', 'MoCo v3 with a ResNet-50 and a ViT-B/16'),
      Item('Table 19', 'image and text; the baseline is `:clip`', CLIP, needs='CC3M'),
      Item('Table 20', 'cost functions'),
      Item('Table 21', 'the classes of ImageNet-100', nothing='`data.classes=imagenet100`'),
      concept('Figure 1', 'attraction and repulsion'),
      concept('Figure 2', 'the framework'),
      Item('Figure 3', 'conditional entropy during training, CIFAR-10', CACR),
      Item('Figure 4', 'conditional entropy during training, CIFAR-100', CACR),
      Item('Figure 5', 'conditional entropy during training, exponential imbalance', CACR),
      Item('Figure 6', 'positives and negatives with their weights', f'{SAMPLES} weights WORKDIR', status=NOT_DRAWN),
      Item('Figure 7', 't-SNE during training', f'{SAMPLES} tsne WORKDIR ...'),
      Item('Figure 8', 'accuracy by number of negatives', CACR),
      Item('Figure 9', 'accuracy by number of positives', CACR),
      Item('Figure 10', 'accuracy during training', CACR),
    ),
  ),
  'balanced': Paper(
    'Lee 2025, Understanding Self-supervised Contrastive Learning through Supervised Objectives',
    ('balanced', 'balanced_imagenet'),
    (
      Item('Table 1', 'similarity measures, ImageNet (CIFAR-10: our addition)'),
      Item('Table 2', 'class distributions, ImageNet (CIFAR-10: our addition)'),
      Item('Table 3', 'the framework and SimCLR', nothing='cross-references within the paper'),
      Item('Table 4', 'kNN and linear accuracy, CIFAR-10 and ImageNet'),
      Item('Table 5', 'class distributions with the balanced loss, ImageNet (CIFAR-10: our addition)'),
      concept('Figure 1', 'supervised learning as an optimization'),
      concept('Figure 2', 'self-supervised learning as an approximation'),
      Item('Figure 3', 'accuracy against prototype bias, ImageNet (CIFAR-10: our addition)', BALANCED),
      Item('Figure 4', 'accuracy by α and λ, ImageNet', BALANCED),
      Item('Figure 5', 'accuracy by α and λ, CIFAR-10', BALANCED),
      Item('Figure 6', 'gaps of the bounds during training', BALANCED),
    ),
  ),
}


@functools.cache
def sweep(name: str) -> Sweep:
  """The sweep of a folder."""
  return importlib.import_module(f'experiments.{name}.sweep').SWEEP


def rows(paper: Paper, item: str) -> dict[str, list[Row]]:
  """{sweep: its rows for a table or figure}, without sweeps that have none."""
  found = {name: [row for row in sweep(name).rows if item in row.shows] for name in paper.sweeps}
  return {name: of_sweep for name, of_sweep in found.items() if of_sweep}


def needs(chosen: Mapping[str, Any]) -> str:
  """Data and weights that a run needs and that were not available; '' if there are none.

  >>> needs({'data': {'name': 'svhn_cropped'}, 'eval': {'data': {'name': ''}}, 'init': ''})
  'SVHN'
  """
  names = (chosen['data']['name'], chosen['eval']['data']['name'])
  found = [ELSEWHERE.get(name, name) for name in names if name and name not in HERE]
  found += [] if chosen['init'] in ('', 'random') else [WEIGHTS.get(chosen['init'].partition('/')[0], chosen['init'])]
  return ' and '.join(dict.fromkeys(found))


@functools.cache  # many rows have the same data and differ only in hyperparameters
def _loaded(path: str, overrides: tuple[str, ...]) -> Mapping[str, Any]:
  return config.load(path, overrides)


def statuses(name: str, experiments: pathlib.Path = FOLDER) -> dict[str, str]:
  """{row: 'run', 'ready', or 'needs ...'} of a sweep."""
  done = {result['name'] for result in tables.read(experiments / name / 'results.jsonl')}

  def status(row: Row) -> str:
    if row.name in done:
      return 'run'
    changes = {**sweep(name).common, **row.changes}
    about_data = {key: value for key, value in changes.items() if key.startswith(('data.', 'eval.data.', 'init'))}
    missing = needs(_loaded(row.config, tuple(f'{key}={value}' for key, value in about_data.items())))
    return f'needs {missing}' if missing else 'ready'

  return {row.name: status(row) for row in sweep(name).rows}


def summary(found: Sequence[str]) -> str:
  """The statuses of several rows, summarized in one line.

  >>> summary(['run', 'ready', 'ready']), summary(['run', 'run']), summary(['needs SVHN', 'needs SVHN and STL-10'])
  ('1 of 3 run, 2 ready', 'run', 'needs SVHN and STL-10')
  """
  missing = [status.removeprefix('needs ') for status in found if status.startswith('needs ')]
  names = dict.fromkeys(name for together in missing for name in together.split(' and '))
  *most, last = sorted(names, key=lambda name: name in WEIGHTS.values()) or ['']  # weights last: their names are long
  needed = f'{", ".join(most)} and {last}' if most else last
  counts = {'run': found.count('run'), 'ready': found.count('ready'), f'need {needed}': len(missing)}
  counts = {status: count for status, count in counts.items() if count}
  if len(counts) == 1:
    return f'needs {needed}' if missing else found[0]
  text = lambda status: f'of {len(found)} run' if status == 'run' else status
  return ', '.join(f'{count} {text(status)}' for status, count in counts.items())


def describe(paper: Paper, item: Item, known: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
  """The status of a table or figure, and its commands. `known`: the `statuses` of each sweep."""
  if item.nothing:
    return f'nothing to run: {item.nothing}', []
  found = rows(paper, item.name)
  commands = [f"python -m experiments.{name}.sweep --of='{item.name}'" for name in found]
  commands += [item.command] if item.command else []
  if item.status:
    return item.status, commands
  if found:
    return summary([known[name][row.name] for name, of_sweep in found.items() for row in of_sweep]), commands
  if item.needs:
    return f'needs {item.needs}', commands
  if item.drawn:
    return 'run' if (FOLDER / item.drawn).exists() else 'ready', commands
  return 'no command' if not commands else 'ready', commands


def markdown() -> str:
  """The tables and figures of each paper with their commands and status, then every run of its sweeps."""
  known = {name: statuses(name) for paper in PAPERS.values() for name in paper.sweeps}
  parts = []
  for paper in PAPERS.values():
    lines = [f'## {paper.title}\n', '| | what it shows | status | command |', '|---|---|---|---|']
    for item in paper.items:
      status, commands = describe(paper, item, known)
      lines.append(f'| {item.name} | {item.about} | {status} | {"<br>".join(f"`{text}`" for text in commands)} |')
    for name in paper.sweeps:
      lines += [f'\n### Runs of experiments.{name}\n', '| run | belongs to | status | config |', '|---|---|---|---|']
      common = ' '.join(tables.flags(sweep(name).common))
      for row in sweep(name).rows:
        command = ' '.join([row.config, *tables.flags(row.changes)])
        shows = '; '.join(row.shows) or 'our addition'
        lines.append(f'| `{row.name}` | {shows} | {known[name][row.name]} | `{command}` |')
      lines += [f'\nAll also use `{common}`.'] if common else []
    parts.append('\n'.join(lines))
  return '\n\n'.join(parts) + '\n'


if __name__ == '__main__':
  print(markdown())
