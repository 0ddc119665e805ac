"""Retrieval against a loop that sorts, and zero-shot classifiers against their definition."""

import numpy as np
import pytest

from ssl_jax.evals import metrics, prompts, retrieval


def cases(seed=0, images=30, texts=50, width=6):
  rng = np.random.default_rng(seed)
  x, y = rng.normal(size=(images, width)), rng.normal(size=(texts, width))
  own = [rng.choice(texts, size=rng.integers(1, 4), replace=False).tolist() for _ in range(images)]
  return x, y, own


def by_sorting(queries, keys, correct, k):
  """The share of the queries that have a correct key among the k nearest, in percent."""
  unit = lambda v: v / np.linalg.norm(v)
  hits = []
  for query, right in zip(queries, correct, strict=True):
    order = sorted(range(len(keys)), key=lambda j, q=query: -(unit(q) @ unit(keys[j])))
    hits.append(bool({*order[:k]} & {*right}))
  return 100 * np.mean(hits)


def test_recalls_are_those_of_sorting(monkeypatch):
  monkeypatch.setattr(retrieval, 'ROWS', 7)
  x, y, own = cases()
  asked = [j for j in range(len(y)) if any(j in texts for texts in own)]
  y, own = y[asked], [[asked.index(j) for j in texts] for texts in own]
  found = retrieval.recalls(x, y, own)
  images_of = [[i for i, texts in enumerate(own) if j in texts] for j in range(len(y))]
  for k in (1, 5, 10):
    assert found[f'image_to_text_{k}'] == pytest.approx(by_sorting(x, y, own, k))
    assert found[f'text_to_image_{k}'] == pytest.approx(by_sorting(y, x, images_of, k))


def test_a_perfect_and_a_collapsed_model():
  x, own = np.eye(20), [[i] for i in range(20)]
  assert set(retrieval.recalls(x, x, own).values()) == {100.0}
  assert set(retrieval.recalls(np.ones((20, 3)), np.ones((20, 3)), own).values()) == {0.0}, 'ties do not count'


def test_images_with_the_same_caption_share_it():
  x, y = np.eye(4)[[0, 0, 1, 2]], np.eye(4)[:3]
  assert set(retrieval.recalls(x, y, [[0], [0], [1], [2]]).values()) == {100.0}


def test_the_classifier_is_the_mean_direction_of_the_prompts():
  x = np.random.default_rng(0).normal(size=(6, 5))
  found = prompts.classifier(x, 3)
  for c in range(3):
    mean = np.mean([row / np.linalg.norm(row) for row in x[2 * c : 2 * c + 2]], axis=0)
    np.testing.assert_allclose(found[c], mean / np.linalg.norm(mean), rtol=1e-5)


def test_every_template_names_the_class_once():
  for templates in prompts.TEMPLATES.values():
    assert len({*templates}) == len(templates)
    assert all(template.count('{}') == 1 for template in templates)
  assert {*prompts.OF_SET.values()} <= {*prompts.TEMPLATES}


def test_templates_and_names_from_files(tmp_path):
  (tmp_path / 'prompts.txt').write_text('a {}\n\nthe {}\n')
  assert prompts.templates(str(tmp_path / 'prompts.txt'), 'any') == ('a {}', 'the {}')
  assert prompts.templates('imagenet', 'any') == prompts.TEMPLATES['imagenet'] == prompts.templates('', 'imagenet2012')
  labels = np.array([0, 1, 1])
  assert prompts.class_names('', ['sea_star', 'b'], labels) == ('sea star', 'b')
  (tmp_path / 'names.txt').write_text('n02\tgoldfish\nn01\ttench\n')
  assert prompts.class_names(str(tmp_path / 'names.txt'), ['n01', 'n02'], labels) == ('tench', 'goldfish')
  (tmp_path / 'plain.txt').write_text('tench\ngoldfish\n')
  assert prompts.class_names(str(tmp_path / 'plain.txt'), ['n01', 'n02'], labels) == ('tench', 'goldfish')


def test_refusals(tmp_path):
  (tmp_path / 'prompts.txt').write_text('a {}\nno class\n')
  (tmp_path / 'names.txt').write_text('n01\ttench\n')
  labels = np.array([0, 1])
  for message, call in (
    (
      r"^eval\.prompts = 'imagenett' is not a file: .*did you mean 'imagenet'",
      lambda: prompts.templates('imagenett', ''),
    ),
    (
      r"has the line 'no class': each must have \{\} once",
      lambda: prompts.templates(str(tmp_path / 'prompts.txt'), ''),
    ),
    (r'needs the names of 2 classes, and the data has 0', lambda: prompts.class_names('', (), labels)),
    (r"lacks 'n02': give a line", lambda: prompts.class_names(str(tmp_path / 'names.txt'), ['n01', 'n02'], labels)),
    (r"^eval\.class_names = 'none\.txt' is not a file", lambda: prompts.class_names('none.txt', ['a', 'b'], labels)),
  ):
    with pytest.raises(ValueError, match=message) as error:
      call()
    assert '\n' not in str(error.value)


def test_the_modality_gap_is_the_distance_of_the_means():
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 9, 4)) + np.array([[[2.0]], [[0.0]]])
  unit = lambda v: v / np.linalg.norm(v, axis=1, keepdims=True)
  expected = np.linalg.norm(unit(x).mean(axis=0) - unit(y).mean(axis=0))
  assert metrics.modality_gap(x, y) == pytest.approx(expected, rel=1e-5)
  assert metrics.modality_gap(x, x) == 0
