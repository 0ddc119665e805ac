"""Computes all numbers and curves of an evaluation from features, which may come from any encoder."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.linalg

from ssl_jax.evals import check, knn, linear, metrics, scoring
from ssl_jax.temperature import Temperature

# Constant temperatures of the penalty curves that are drawn next to that of the run (Wang & Liu 2021 Fig. 3).
TEMPERATURES = (0.07, 0.2, 0.5, 1.0)
BINS = 80  # of histograms over the similarity, in [-1, 1]
MAP_IMAGES = 1500  # largest number of test images in `plane`
TRAIN_IMAGES = 10_000  # largest number of training images in the measures named train_*


@dataclasses.dataclass(frozen=True)
class LossSettings:
  """Parameters of a run's loss that the measures use. The defaults are for features from a file.

  Attributes:
    temperature: a number, a function of the similarity, or None.
    alpha: 1 / temperature in `repelling_gap`.
    t_neg: parameter of the distribution of negatives in `conditional_entropy`.
    batch_size: examples per mini-batch of `conditional_entropy`.
  """

  temperature: Temperature | None = None
  alpha: float = 2.0
  t_neg: float = 2.0
  batch_size: int = 768


@dataclasses.dataclass(frozen=True)
class Space:
  """Features of one layer: of training images, of test images, and of augmented views of some test images.

  The partner of an image is an image of the same class whose views have the same random augmentations. The bank has one
  augmented view of each of many training images.
  """

  train: np.ndarray  # [n, d]
  test: np.ndarray  # [m, d]
  views: np.ndarray | None = None  # [v, k, d]
  partners: np.ndarray | None = None  # [v, k, d]
  bank: np.ndarray | None = None  # [b, d]


@dataclasses.dataclass(frozen=True)
class Labels:
  """The class of each image, and the names of the classes."""

  train: np.ndarray  # [n]
  test: np.ndarray  # [m]
  views: np.ndarray | None = None  # [k]
  names: Sequence[str] = ()
  bank: np.ndarray | None = None  # [b]

  def checked(self, train: int, test: int) -> 'Labels':
    """Labels with names for all classes. Raises for missing labels, a single class, or test classes not in training."""
    train = check.labels('train labels', self.train, train)
    test = check.labels('test labels', self.test, test)
    check.seen('test labels', test, 'train labels', train)
    names = tuple(self.names) or tuple(str(c) for c in range(int(train.max()) + 1))
    return dataclasses.replace(self, train=train, test=test, names=names)


def accuracies(space: Space, labels: Labels, settings: Mapping) -> tuple[dict, dict]:
  """kNN for each k, and the linear classifier.  -> {'knn200': percent, ...}, {'knn200': predicted classes [m], ...}"""
  numbers: dict[str, Any] = {}
  predictions: dict[str, np.ndarray] = {}
  topk = (1, 5) if len(np.unique(labels.train)) > 5 else (1,)
  if settings['k']:
    votes = dict(k=settings['k'], vote=settings['vote'], temperature=settings['temperature'])
    scores = knn.classify(space.train, labels.train, space.test, **votes)
    numbers |= knn.percentages(scores, labels.test, topk)
    predictions |= {f'knn{k}': x.argmax(axis=1) for k, x in scores.items()}
    if settings['whiten']:
      numbers |= knn.white_accuracy(space.train, labels.train, space.test, labels.test, **votes)
  if name := settings['linear']:
    found = linear.evaluate(name, space.train, labels.train, space.test, labels.test, seeds=settings['seeds'])
    numbers |= {'linear': found.report['top1'], 'linear_std': found.report['top1_std']}
    numbers['linear_settings'] = linear.settings_of(found.report)
    if 5 in topk:
      numbers['linear_top5'] = found.report['top5']
    predictions['linear'] = found.predictions[0]
  return numbers, predictions


def by_class(predictions: Mapping[str, np.ndarray], labels: Labels) -> tuple[dict, dict]:
  """Accuracy and most frequent confusion of each class; head, middle and tail accuracies if class sizes differ."""
  classes = len(labels.names)
  train = np.bincount(labels.train, minlength=classes)
  table = {
    'names': list(labels.names),
    'train': train.tolist(),
    'test': np.bincount(labels.test, minlength=classes).tolist(),
  }
  confused: dict[str, np.ndarray] = {}
  thirds: dict[str, float] = {}
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


def measures(space: Space, labels: Labels | None, loss: LossSettings) -> dict[str, float]:
  """All measures of a representation, from test images and, if available, their augmented views and labels.

  Measures named train_* use training images; the difference from the test images shows the effect of having seen an
  image. Measures that are undefined for these features are left out.
  """
  x, temperature = space.test, loss.temperature
  batch = min(loss.batch_size, len(x))
  chosen = np.random.default_rng(0).permutation(len(space.train))[:TRAIN_IMAGES]
  train = space.train[chosen]
  shuffled = x[np.random.default_rng(0).permutation(len(x))]
  wanted: dict[str, Callable[[], float]] = {
    'uniformity': lambda: metrics.uniformity(x),
    'rankme': lambda: metrics.rankme(x),
    'train_uniformity': lambda: metrics.uniformity(train),
    'alpha_req': lambda: metrics.alpha_req(x),
    'conditional_entropy': lambda: metrics.conditional_entropy(shuffled, t_neg=loss.t_neg, batch=batch),
  }
  if labels is not None:
    y, train_labels = labels.test, labels.train[chosen]
    wanted |= {
      'tolerance': lambda: metrics.tolerance(x, y),
      'same_label_similarity': lambda: metrics.same_label_similarity(x, y),
      'inter_class_uniformity': lambda: metrics.inter_class_uniformity(x, y),
      'train_same_label_similarity': lambda: metrics.same_label_similarity(train, train_labels),
    }
  if temperature is not None:
    wanted['penalty_entropy'] = lambda: metrics.penalty_entropy(x, temperature)
  if space.views is not None:
    views, partners = space.views, space.partners
    wanted |= {
      'alignment': lambda: metrics.alignment(views),
      'lidar': lambda: metrics.lidar(views),
    }
    if len(views) > 2:  # with one other view, its direction is that of the mean, and the gap is 0
      wanted['attracting_gap'] = lambda: metrics.attracting_gap(views[0], views[1:])
    if labels is not None:
      view_labels, bank, bank_labels = labels.views, space.bank, labels.bank
      assert view_labels is not None
      wanted['prototype_bias'] = lambda: metrics.prototype_bias(views, view_labels)
      if bank is not None and bank_labels is not None:
        gap = functools.partial(metrics.repelling_gap, views[0], view_labels, bank, bank_labels, alpha=loss.alpha)
        wanted['repelling_gap'] = gap
    if partners is not None:
      wanted['prototype_bias_sampled'] = lambda: metrics.prototype_bias_sampled(views, partners)
  found = {}
  for name, measure in wanted.items():
    # Some are undefined for a collapsed encoder, few images or dimensions, or classes with one image.
    with contextlib.suppress(ValueError):
      if math.isfinite(value := measure()):
        found[name] = value
  return found


def measures_of(spaces: Mapping[str, Space], labels: Labels, loss: LossSettings) -> dict[str, dict]:
  """The measures of each layer. Those that depend on the temperature are only for the layer that the loss compares."""
  compared = 'projector' if 'projector' in spaces else next(iter(spaces))
  without = dataclasses.replace(loss, temperature=None)
  return {name: measures(x, labels, loss if name == compared else without) for name, x in spaces.items()}


def measure_settings(space: Space, loss: LossSettings) -> dict[str, float]:
  """The settings of `conditional_entropy` and `repelling_gap`, for evaluation.json.

  Older evaluations without these settings used t_neg = 2, at most 768 images per mini-batch, alpha = 2, and a second
  view of the test images as the bank.
  """
  settings = {'t_neg': loss.t_neg, 'batch_size': min(loss.batch_size, len(space.test))}
  return settings if space.bank is None else settings | {'alpha': loss.alpha, 'bank': len(space.bank)}


def curves(space: Space, labels: Labels, temperature: Temperature | None) -> dict[str, np.ndarray]:
  """The curves of the papers' figures, for the features that the loss compares."""
  found: dict[str, np.ndarray] = {}
  if space.views is not None:
    first, second = space.views[:2]
    assert labels.views is not None
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


def plane(x: np.ndarray, labels: np.ndarray, count: int = MAP_IMAGES) -> dict[str, np.ndarray]:
  """The first two principal components of the normalized features of at most `count` images, with fixed signs."""
  chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:count])
  x = np.asarray(x[chosen], np.float64)
  x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
  x -= x.mean(axis=0, keepdims=True)
  # Computed from the Gram matrix of the images, whose size does not depend on the number of features.
  values, axes = scipy.linalg.eigh(x @ x.T, subset_by_index=[len(x) - 2, len(x) - 1])
  values, axes = np.maximum(values[::-1], 0), axes[:, ::-1]
  axes *= np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(2)])[None, :]
  shares = values / max(np.square(x).sum(), 1e-24)
  return {'map': axes * np.sqrt(values)[None, :], 'map_labels': labels[chosen], 'map_shares': shares}


def evaluate_features(
  spaces: Mapping[str, Space],
  labels: Labels,
  settings: Mapping,
  *,
  loss: LossSettings | None = None,
) -> tuple[dict, dict[str, np.ndarray]]:
  """All numbers and curves for the features of one checkpoint.

  Args:
    spaces: features by layer. Accuracies use the layer settings['features']. Curves use 'projector', if it is given,
      because the loss compares its outputs.
    settings: 'features', 'k', 'vote', 'temperature' (of the vote), 'whiten', 'linear' and 'seeds' of the config section
      `eval`.
    loss: parameters of the run's loss, for the measures and curves.

  Returns:
    Numbers, ready for JSON, and arrays for the figures. The same features always give exactly the same results.
  """
  loss = loss or LossSettings()
  space = spaces[settings['features']]
  labels = labels.checked(len(space.train), len(space.test))
  numbers, predictions = accuracies(space, labels, settings)
  detail, arrays = by_class(predictions, labels)
  compared = spaces.get('projector', space)
  counts = {'train': len(space.train), 'test': len(space.test)}
  if space.views is not None:
    counts |= {'views': len(space.views), 'viewed': space.views.shape[1]}
  results = {
    'features': settings['features'],
    'linear_protocol': settings['linear'],
    **numbers,
    'images': counts,
    'measures': measures_of(spaces, labels, loss),
    'measure_settings': measure_settings(space, loss),
    **detail,
  }
  arrays |= curves(compared, labels, loss.temperature) | plane(space.test, labels.test)
  return results, arrays
