"""From features to every number and every curve of an evaluation. It knows of no run, so that any features will do."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
import scipy.linalg

from ssl_jax.evals import check, knn, linear, metrics, scoring
from ssl_jax.temperature import Temperature

# Temperatures that a run's own is compared with in the penalty curves (behaviour Fig. 3).
TEMPERATURES = (0.07, 0.2, 0.5, 1.0)
BINS = 80  # of similarities in [-1, 1]
MAPPED = 1500  # test images in the map
ENTROPY_BATCH = 768  # of cacr's conditional entropy
MEASURED = 10_000  # training images, at most, whose uniformity is compared with that of the test images


@dataclasses.dataclass(frozen=True)
class Space:
  """The features of one layer: of training and test images, and of augmented views of some test images.

  A partner is an image of the same class, in the same views: with the same draw of each augmentation.
  """

  train: np.ndarray  # [n, d]
  test: np.ndarray  # [m, d]
  views: np.ndarray | None = None  # [v, k, d]
  partners: np.ndarray | None = None  # [v, k, d]


@dataclasses.dataclass(frozen=True)
class Labels:
  """The class of each image, and the classes' names."""

  train: np.ndarray  # [n]
  test: np.ndarray  # [m]
  views: np.ndarray | None = None  # [k]
  names: Sequence[str] = ()

  def checked(self, train: int, test: int) -> 'Labels':
    """Refuses missing labels, a single class and test classes without training images."""
    train = check.labels('train labels', self.train, train)
    test = check.labels('test labels', self.test, test)
    check.seen('test labels', test, 'train labels', train)
    names = tuple(self.names) or tuple(str(c) for c in range(int(train.max()) + 1))
    return dataclasses.replace(self, train=train, test=test, names=names)


def accuracies(space: Space, labels: Labels, settings: Mapping) -> tuple[dict, dict]:
  """kNN for each k and the linear classifier.  -> {'knn200': percent, ...}, {'knn200': the predicted classes, ...}"""
  numbers, predictions = {}, {}
  topk = (1, 5) if len(np.unique(labels.train)) > 5 else (1,)
  if settings['k']:
    votes = dict(k=settings['k'], vote=settings['vote'], temperature=settings['temperature'])
    for k, scores in knn.classify(space.train, labels.train, space.test, **votes).items():
      for top in topk:
        hit = knn.hits(scores, labels.test, top)
        numbers[f'knn{k}' + (f'_top{top}' if top > 1 else '')] = 100 * float(hit.mean())
      predictions[f'knn{k}'] = scores.argmax(axis=1)
  if name := settings['linear']:
    data = (space.train, labels.train, space.test, labels.test)
    if name in linear.PROTOCOLS:
      found = linear.probe(*data, name, seeds=settings['seeds'])
    else:
      found = {'logistic': linear.logistic, 'ridge': linear.ridge}[name](*data)
    numbers |= {'linear': found.report['top1'], 'linear_std': found.report['top1_std']}
    numbers['linear_settings'] = linear.settings_of(found.report)
    if 5 in topk:
      numbers['linear_top5'] = found.report['top5']
    predictions['linear'] = found.predictions[0]
  return numbers, predictions


def by_class(predictions: Mapping[str, np.ndarray], labels: Labels) -> tuple[dict, dict]:
  """Accuracy of each class, its most frequent confusion, and head, middle and tail where classes differ in size."""
  classes = len(labels.names)
  train = np.bincount(labels.train, minlength=classes)
  table = {
    'names': list(labels.names),
    'train': train.tolist(),
    'test': np.bincount(labels.test, minlength=classes).tolist(),
  }
  confused, thirds = {}, {}
  for name, predicted in predictions.items():
    matrix = scoring.confusion(predicted, labels.test, classes)
    accuracy = scoring.per_class_accuracy(matrix)
    table[name] = [None if np.isnan(x) else float(x) for x in accuracy]
    wrong = matrix * (1 - np.eye(classes, dtype=matrix.dtype))
    table[f'{name}_mistaken_for'] = [labels.names[row.argmax()] if row.any() else None for row in wrong]
    confused[f'confusion_{name}'] = matrix
    present = train > 0
    if (
      train[present].max() >= 2 * train[present].min() and present.sum() >= 3 and not np.isnan(accuracy[present]).any()
    ):
      thirds |= {f'{name}_{k}': v for k, v in scoring.head_middle_tail(accuracy[present], train[present]).items()}
  return {'classes': table, **thirds}, confused


def measures(space: Space, labels: Labels, temperature: Temperature | None) -> dict[str, float]:
  """Every measure of a representation, of the test images and of their views where there are any.

  What begins with train_ is of training images: where it differs, the encoder places images it knows in another way.
  A measure that these features do not have is left out.
  """
  x, y = space.test, labels.test
  chosen = np.random.default_rng(0).permutation(len(space.train))[:MEASURED]
  known, classes = space.train[chosen], labels.train[chosen]
  shuffled = x[np.random.default_rng(0).permutation(len(x))]
  wanted = {
    'uniformity': lambda: metrics.uniformity(x),
    'tolerance': lambda: metrics.tolerance(x, y),
    'same_label_similarity': lambda: metrics.same_label_similarity(x, y),
    'inter_class_uniformity': lambda: metrics.inter_class_uniformity(x, y),
    'rankme': lambda: metrics.rankme(x),
    'train_uniformity': lambda: metrics.uniformity(known),
    'train_same_label_similarity': lambda: metrics.same_label_similarity(known, classes),
    'alpha_req': lambda: metrics.alpha_req(x),
    'conditional_entropy': lambda: metrics.conditional_entropy(shuffled, batch=min(ENTROPY_BATCH, len(x))),
  }
  if temperature is not None:
    wanted['penalty_entropy'] = lambda: metrics.penalty_entropy(x, temperature)
  if space.views is not None:
    views, of_views = space.views, labels.views
    wanted |= {
      'alignment': lambda: metrics.alignment(views),
      'prototype_bias': lambda: metrics.prototype_bias(views, of_views),
      'attracting_gap': lambda: metrics.attracting_gap(views[0], views[1:]),
      'repelling_gap': lambda: metrics.repelling_gap(views[0], of_views, views[1], of_views),
      'lidar': lambda: metrics.lidar(views),
    }
  if space.partners is not None:
    wanted['prototype_bias_sampled'] = lambda: metrics.prototype_bias_sampled(space.views, space.partners)
  found = {}
  for name, measure in wanted.items():
    # Some have no value: of a collapsed encoder, of few images or dimensions, of classes with one image.
    with contextlib.suppress(ValueError):
      if math.isfinite(value := measure()):
        found[name] = value
  return found


def measures_of(spaces: Mapping[str, Space], labels: Labels, temperature: Temperature | None) -> dict[str, dict]:
  """The measures of each layer; the temperature is of the similarities that the loss sees."""
  compared = 'projector' if 'projector' in spaces else next(iter(spaces))
  return {name: measures(x, labels, temperature if name == compared else None) for name, x in spaces.items()}


def curves(space: Space, labels: Labels, temperature: Temperature | None) -> dict[str, np.ndarray]:
  """What the figures of the papers plot, in the space where the loss compares."""
  found = {}
  if space.views is not None:
    first, second = space.views[:2]
    histograms = metrics.similarity_histograms(first, second, labels.views, bins=BINS)
    found |= {f'similarities_{name}': counts for name, counts in histograms.items()}
    nearest = metrics.local_separation(first, second, k=min(10, len(first) - 1))
    found |= {'separation_mean': nearest.mean(axis=0), 'separation_std': nearest.std(axis=0)}
  for tau in TEMPERATURES:
    found[f'penalty_{tau}'] = metrics.penalty_distribution(space.test, tau, bins=BINS)['penalty']
  if temperature is not None:
    found['penalty_own'] = metrics.penalty_distribution(space.test, temperature, bins=BINS)['penalty']
    s = jnp.linspace(-1, 1, 201)
    tau = temperature(s) if callable(temperature) else jnp.full_like(s, temperature)
    found |= {'temperature_s': np.asarray(s), 'temperature_tau': np.asarray(tau)}
  found['penalty_edges'] = np.linspace(-1, 1, BINS + 1)
  return found


def plane(x: np.ndarray, labels: np.ndarray, count: int = MAPPED) -> dict[str, np.ndarray]:
  """At most `count` images on the two principal components of their unit features, each axis with a fixed sign."""
  chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:count])
  x = np.asarray(x[chosen], np.float64)
  x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
  x -= x.mean(axis=0, keepdims=True)
  # Of the images' Gram matrix, which stays small where features are wide.
  values, axes = scipy.linalg.eigh(x @ x.T, subset_by_index=[len(x) - 2, len(x) - 1])
  values, axes = np.maximum(values[::-1], 0), axes[:, ::-1]
  axes *= np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(2)])[None, :]
  shares = values / max(np.square(x).sum(), 1e-24)
  return {'map': axes * np.sqrt(values)[None, :], 'map_labels': labels[chosen], 'map_shares': shares}


def judge(
  spaces: Mapping[str, Space],
  labels: Labels,
  settings: Mapping,
  *,
  temperature: Temperature | None = None,
) -> tuple[dict, dict[str, np.ndarray]]:
  """Everything that one checkpoint's features say.

  Args:
    spaces: by layer; accuracies are of the one that settings['features'] names, the similarities that the loss would
      see are of 'projector' where there is one.
    settings: 'features', 'k', 'vote', 'temperature' (of the vote), 'linear' and 'seeds' of the config's `eval`.
    temperature: of the loss, a number or a function of the similarity.

  Returns:
    Numbers, ready for JSON, and arrays for the figures. The same features give the same digits.
  """
  judged = spaces[settings['features']]
  labels = labels.checked(len(judged.train), len(judged.test))
  numbers, predictions = accuracies(judged, labels, settings)
  detail, arrays = by_class(predictions, labels)
  compared = spaces.get('projector', judged)
  counts = {'train': len(judged.train), 'test': len(judged.test)}
  if judged.views is not None:
    counts |= {'views': len(judged.views), 'viewed': judged.views.shape[1]}
  results = {
    'features': settings['features'],
    'linear_protocol': settings['linear'],
    **numbers,
    'images': counts,
    'measures': measures_of(spaces, labels, temperature),
    **detail,
  }
  arrays |= curves(compared, labels, temperature) | plane(judged.test, labels.test)
  return results, arrays
