"""Evaluation of image-text models: zero-shot classification, retrieval, and the measures of each tower."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ssl_jax.data.sentences import Sentences
from ssl_jax.evals import features, from_features, metrics, prompts, retrieval, scoring
from ssl_jax.evals.image_evaluator import ImageEvaluator, loss_settings, outline
from ssl_jax.methods.image_text import ImageText
from ssl_jax.models import bert
from ssl_jax.run.builder import Run
from ssl_jax.run.state import State
from ssl_jax.workdir import metric_log


class ImageTextEvaluator:
  """Evaluates a run on the images of `run.eval_test`, with their labels, their captions or both.

  With `eval.k`, `eval.linear`, `eval.finetune` or an online probe, the image encoder is also evaluated alone.
  """

  def __init__(self, run: Run):
    self.run, choice = run, run.config.eval
    assert isinstance(run.method, ImageText)
    alone = choice.k or choice.linear or choice.finetune or run.online_probe
    self.images = ImageEvaluator(run) if alone else None
    self.test = run.eval_test
    self.sources = self.images.sources if self.images else {'test': self.test}
    self.names: tuple[str, ...] = ()
    if choice.prompts != prompts.NONE and self.test.labels is not None:
      self.names = prompts.class_names(choice.class_names, self.test.class_names, self.test.labels)
      self.templates = prompts.templates(choice.prompts, run.eval_data['name'])
    self.retrieves = self.test.paired and choice.retrieval > 0
    if not (self.images or self.names or self.retrieves):
      raise ValueError(
        f'data.test_split = {run.eval_data["test_split"]!r} of data.name = {run.eval_data["name"]!r} has neither '
        'labels nor captions: name another set with eval.data, or set eval.prompts=none and eval.retrieval=0'
      )
    self._see = features.extractor(run.method.features, run.views.eval_view, run.devices)
    self._read = features.extractor(run.method.text_features, bert.without_dropout, run.devices)
    self._listed: list[tuple[str, list[tuple[float, str]]]] = []

  def scores(self, state: State) -> dict[str, float]:
    """{'zero_shot': percent, 'image_to_text_1': ..., ...}, with kNN if `eval.k` is set. The state is on the devices."""
    return self._scores(state)[0] | (self.images.scores(state) if self.images else {})

  def at_start(self, state: State) -> dict[str, float]:
    """`scores` of the untrained encoders. The state is on the host."""
    own = self._scores(self.run.devices.replicate(state))[0]
    return own | (self.images.at_start(state) if self.images else {})

  def evaluate(self, state: State, workdir: pathlib.Path) -> dict:
    """Runs every evaluation enabled in the config and writes evaluation.json. The state is on the host."""
    run, choice = self.run, self.run.config.eval
    if self.images:
      numbers, arrays = self.images.results(state, workdir)
    else:
      numbers = outline(run, int(state.step), self.test)
      numbers |= {'features': choice.features, 'images': {'test': len(self.test)}}
      arrays = {}
    found, details = self._scores(run.devices.replicate(state), measured=True)
    measures = {**details.pop('measures'), **numbers.pop('measures', {})}
    settings = {key: details[key] for key in ('measure_settings',) if key in details}
    results = {**settings, **numbers, **found, 'measures': measures}
    if self.names:
      labels = from_features.Labels(details['labels'], details['labels'], names=self.names)
      detail, confused = from_features.by_class({'zero_shot': details['predicted']}, labels)
      del detail['classes']['train']  # zero-shot classification has no training images
      results['classes'] = {**detail['classes'], **numbers.get('classes', {})}
      results['classes'] |= {key: x for key, x in detail['classes'].items() if key.startswith('zero_shot')}
      arrays |= confused
      results['prompts'] = list(self.templates)
    metric_log.write_evaluation(workdir, results, arrays, name=choice.data.name)
    return results

  def neighbors(self) -> list[tuple[str, list[tuple[float, str]]]]:
    """Some test images, named by a caption, and their nearest captions: (name, [(cosine, caption), ...])."""
    return self._listed

  def _scores(self, state: State, measured: bool = False) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the zero-shot accuracy and recalls; and the predictions, labels and measures for the report."""
    config, found = self.run.config, {}
    details: dict[str, Any] = {'measures': {}}
    sizes = dict(size=features.image_size(config), batch_size=config.eval.batch_size)
    images, labels = features.extract(self._see, self.run.devices, *state.evaluated, self.test, **sizes)
    if self.names:
      assert labels is not None
      lines = [template.replace('{}', name) for name in self.names for template in self.templates]
      weights = prompts.classifier(self._text(state, lines)['projector'], len(self.names))
      logits = prompts.unit(images['projector']) @ weights.T
      before = scoring.classes_before(logits, labels)
      found['zero_shot'] = scoring.percent(before < 1)
      if len(self.names) > 5:
        found['zero_shot_top5'] = scoring.percent(before < 5)
      details |= {'predicted': logits.argmax(axis=1), 'labels': labels}
    if self.retrieves:
      chosen = np.random.default_rng(config.seed).permutation(len(images['projector']))[: config.eval.retrieval]
      chosen.sort()
      own = self.test.captions_of(self.test.readable()[chosen])
      assert own is not None
      lines = list(dict.fromkeys(text for texts in own for text in texts))
      place = {text: at for at, text in enumerate(lines)}
      texts = self._text(state, lines)
      seen = {layer: x[chosen] for layer, x in images.items()}
      positions = [[place[text] for text in each] for each in own]
      found |= retrieval.recalls(seen['projector'], texts['projector'], positions)
      self._list(seen['projector'], texts['projector'], lines, positions)
      if measured:
        known = None if labels is None else labels[chosen]
        loss = loss_settings(self.run, *self.run.devices.unreplicate((state.step, state.params.get('temperature', {}))))
        details['measures'] = self._measures(seen, texts, positions, known, loss)
        of_images = from_features.Space(seen['projector'], seen['projector'])
        details['measure_settings'] = from_features.measure_settings(of_images, loss)
    return found, details

  def _text(self, state: State, lines: Sequence[str]) -> dict[str, np.ndarray]:
    """The features of sentences, by layer."""
    run = self.run
    source = Sentences(run.train.vocabulary.encode(lines, run.config.data.tokens), run.train.vocabulary)
    sizes = dict(size=run.config.data.tokens, batch_size=run.config.eval.batch_size)
    return features.extract(self._read, run.devices, *state.evaluated, source, **sizes)[0]

  def _list(self, images: np.ndarray, texts: np.ndarray, lines: Sequence[str], own: Sequence[Sequence[int]]) -> None:
    """Stores the nearest captions of some images, for `neighbors`."""
    rows = min(10, len(images))
    chosen = np.arange(rows) * (len(images) // rows)
    cosines = prompts.unit(images[chosen]) @ prompts.unit(texts).T
    self._listed = []
    for i, s in zip(chosen.tolist(), cosines, strict=True):
      nearest = np.argsort(-s, kind='stable')[:3]
      self._listed.append((f'image of "{lines[own[i][0]]}"', [(float(s[at]), lines[at]) for at in nearest]))

  def _measures(
    self,
    images: dict[str, np.ndarray],
    texts: dict[str, np.ndarray],
    own: Sequence[Sequence[int]],
    labels: np.ndarray | None,
    loss: from_features.LossSettings,
  ) -> dict[str, dict[str, float]]:
    """The measures of each tower, and of both together. The text of an image is its first caption.

    Those that depend on the temperature are left out, because the loss compares images with texts.
    """
    first = np.array([positions[0] for positions in own])
    each = min(map(len, own))
    views = np.array([positions[:each] for positions in own]).T if each > 1 else None  # captions act as views
    known = None if labels is None else from_features.Labels(labels, labels, labels)
    loss = dataclasses.replace(loss, temperature=None)
    found = {layer: from_features.measures(from_features.Space(x, x), known, loss) for layer, x in images.items()}
    for layer, x in texts.items():
      space = from_features.Space(x[first], x[first], None if views is None else x[views])
      found[f'text_{layer}'] = from_features.measures(space, known, loss)
    found = {name: {k: v for k, v in x.items() if not k.startswith('train_')} for name, x in found.items()}
    x, y = images['projector'], texts['projector'][first]
    return {
      **found,
      'pairs': {'alignment': metrics.alignment(np.stack([x, y])), 'modality_gap': metrics.modality_gap(x, y)},
    }
