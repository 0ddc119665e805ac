"""Linear classifiers on frozen features: the papers' protocols, and two without a learning rate, for monitoring.

All classifiers train on features extracted without augmentation. For most protocols, we subtract the training mean and
divide by a scalar (our choice). A linear classifier can undo both, and the papers' learning rates, which were tuned for
their own encoders, then suit any encoder.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jax.typing import ArrayLike

from ssl_jax.evals import check
from ssl_jax.evals.scoring import classes_before, mean_and_spread, percent
from ssl_jax.registry import is_whole, require, require_choice, require_positive
from ssl_jax.run.optimizers import for_strict_promotion

HIGHEST = jax.lax.Precision.HIGHEST

# The smallest number of steps per epoch: on datasets smaller than those of the papers, the batch size is reduced.
# ImageNet-LT (115,846 images), the smallest with a batch of 4,096, keeps it.
STEPS_PER_EPOCH = 28


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How a linear classifier is trained: softmax cross-entropy without weight decay."""

  source: str
  optimizer: str  # 'sgd', 'lars' (both with momentum 0.9) or 'adam'
  learning_rate: float
  batch: int
  epochs: int
  milestones: tuple[int, ...] | None = None  # epochs at which `factor` applies; None: cosine decay
  factor: float = 1.0
  scale: str = 'norm'  # which mean square is scaled to 1: that of the 'norm', of a 'coordinate', or 'none'
  crop_scale: tuple[float, float] | None = None  # of random crops (`finetune` only); None: that of the run

  def settings(self) -> dict:
    """The settings of a classifier without augmentation."""
    return {name: value for name, value in dataclasses.asdict(self).items() if name != 'crop_scale'}

  def factors(self) -> np.ndarray:
    """The factor of the learning rate in each epoch.  -> [epochs]"""
    epoch = np.arange(self.epochs)
    if self.milestones is None:
      return 0.5 * (1 + np.cos(np.pi * epoch / self.epochs))
    return self.factor ** (epoch[:, None] >= np.array(self.milestones)[None, :]).sum(axis=1)

  def direction(self) -> optax.GradientTransformation:
    """The optimizer without its learning rate, which the caller applies last, as in torch."""
    if self.optimizer == 'adam':
      return for_strict_promotion(optax.scale_by_adam(b1=0.5, b2=0.999, eps=1e-8))
    if self.optimizer == 'sgd':
      return optax.trace(0.9)
    ratio = optax.scale_by_trust_ratio(trust_coefficient=0.001)
    return optax.chain(optax.masked(ratio, {'kernel': True, 'bias': False}), optax.trace(0.9))


# torchvision's default range of crops, as in the code of He et al. 2020, of Chen & He 2021, and of lightly
CROPS = (0.08, 1.0)
PROTOCOLS = {
  'behaviour': Protocol('Wang & Liu 2021, 5.1 (batch size: CACR)', 'sgd', 30.0, 256, 100, (40, 60, 80), 0.2),
  'cacr_small': Protocol('CACR, App. C.1', 'adam', 1e-3, 128, 100, (60, 80), 0.2, scale='coordinate'),
  'cacr_small_as_is': Protocol('CACR, App. C.1', 'adam', 1e-3, 128, 100, (60, 80), 0.2, scale='none'),
  'cacr_large': Protocol('CACR, App. C.2', 'sgd', 30.0, 256, 100, (60, 80), 0.1, crop_scale=CROPS),
  'balanced_cifar': Protocol('Lee 2025, A.4.1', 'sgd', 30.0, 256, 90),
  'dystress_imagenet': Protocol(
    "lightly's benchmark, used by DySTreSS 5.2", 'sgd', 0.1, 256, 90, scale='none', crop_scale=CROPS
  ),
  'imagenet_lars': Protocol(
    'Lee 2025, A.3.1 (learning rate: Chen & He 2021)', 'lars', 1.6, 4096, 90, scale='coordinate', crop_scale=CROPS
  ),
}


@dataclasses.dataclass(frozen=True)
class Result:
  """The accuracy of a linear classifier.

  Attributes:
    report: the protocol and its settings, 'top1' and 'top5' in percent (means over seeds), 'top1_std' (None for one
      seed) and 'top1_seeds'; ready for JSON.
    predictions: the predicted class of each test example, [seeds, n].
  """

  report: dict
  predictions: np.ndarray


def _batch(protocol: Protocol, examples: int) -> tuple[int, float]:
  """The batch size, reduced for a small dataset, and the matching factor of SGD's learning rate (linear scaling)."""
  batch = max(1, min(protocol.batch, examples // STEPS_PER_EPOCH))
  return batch, batch / protocol.batch if protocol.optimizer == 'sgd' else 1.0


def logits(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
  """The scores of a linear classifier.  [n, d] -> [n, classes]"""
  return jnp.matmul(x, params['kernel'], precision=HIGHEST) + params['bias'][None, :]


def _cross_entropy(params, x, targets):
  """Mean softmax cross-entropy.  targets one-hot [n, classes]"""
  return optax.softmax_cross_entropy(logits(params, x), targets).mean()


def require_seeds(seeds: Sequence[int]) -> None:
  """Raises unless there is at least one seed and none is negative."""
  require('seeds', seeds, lambda x: all(map(is_whole, x)) and min(x) >= 0, 'at least one integer, each 0 or more')


def initial_kernels(seeds: Sequence[int], d: int, num_classes: int) -> np.ndarray:
  """One kernel per seed, normal with standard deviation 0.01, as in MoCo.  -> [s, d, classes]"""
  draw = lambda seed: 0.01 * np.random.default_rng(seed).standard_normal((d, num_classes), np.float32)
  return np.stack([draw(seed) for seed in seeds])


@functools.partial(jax.jit, static_argnames=('protocol', 'batch'))
def _train(x, y, seeds, kernels, learning_rates, *, protocol, batch):
  """Trains all seeds and learning rates at once. All rates of a seed share its batches.  -> params [s, r, ...]"""
  n, num_classes = len(x), kernels.shape[2]
  steps = n // batch
  direction = protocol.direction()

  def one_seed(seed, kernel):
    key = jax.random.key(seed)
    params = {'kernel': kernel, 'bias': jnp.zeros(num_classes)}

    def update(carry, learning_rate, features, targets):
      params, state = carry
      grads = jax.grad(_cross_entropy)(params, features, targets)
      updates, state = direction.update(grads, state, params)
      return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), state

    def epoch(carry, inputs):
      index, factor = inputs
      order = jax.random.permutation(jax.random.fold_in(key, index), n)[: steps * batch].reshape(steps, batch)

      def step(carry, rows):
        targets = jax.nn.one_hot(y[rows], num_classes)
        return jax.vmap(update, in_axes=(0, 0, None, None))(carry, factor * learning_rates, x[rows], targets), None

      return jax.lax.scan(step, carry, order)[0], None

    start = jax.vmap(lambda _: (params, direction.init(params)))(learning_rates)
    schedule = (jnp.arange(protocol.epochs), jnp.asarray(protocol.factors(), jnp.float32))
    return jax.lax.scan(epoch, start, schedule)[0][0]

  return jax.vmap(one_seed)(seeds, kernels)


@jax.jit
def _predict(params, x, y):
  """One classifier at a time.  params [m, ...], [n, d], [n] -> classes [m, n], `classes_before` [m, n], finite [m]"""

  def one(params):
    scores = logits(params, x)
    return jnp.argmax(scores, axis=1), classes_before(scores, y), jnp.isfinite(scores).all()

  return jax.lax.map(one, params)


def _inputs(train_x, train_y, test_x, test_y):
  train_x, test_x = check.features('train_x', train_x), check.features('test_x', test_x)
  check.same_width('test_x', test_x, 'train_x', train_x)
  train_y = check.labels('train_y', train_y, len(train_x))
  test_y = check.labels('test_y', test_y, len(test_x), classes=1)
  check.seen('test_y', test_y, 'train_y', train_y)
  return train_x, train_y, test_x, test_y


@functools.partial(jax.jit, static_argnames='scale')
def moments(train_x: jax.Array, *, scale: str) -> tuple[jax.Array, jax.Array]:
  """The mean to subtract from features and the scalar to divide by (`Protocol.scale`).  [n, d] -> [d], []"""
  if scale == 'none':
    return jnp.zeros(train_x.shape[1]), jnp.ones(())
  mean = train_x.mean(axis=0)
  square = jnp.square(train_x - mean[None, :]).sum() / len(train_x)
  if scale == 'coordinate':
    square /= train_x.shape[1]
  return mean, jnp.sqrt(jnp.maximum(square, 1e-24))


@functools.partial(jax.jit, static_argnames='scale')
def _prepare(train_x, test_x, *, scale):
  mean, number = moments(train_x, scale=scale)
  return tuple((x - mean[None, :]) / number for x in (train_x, test_x))


def settings_of(report: Mapping) -> dict:
  """The settings in a report: everything except mean accuracies, with lists instead of tuples, as in JSON."""
  kept = {key: value for key, value in report.items() if key not in ('top1', 'top1_std', 'top5')}
  return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def _result(report, params, test_x, test_y) -> Result:
  predictions, before, finite = (np.asarray(x) for x in _predict(params, test_x, jnp.asarray(test_y)))
  check.finite('scores of the linear classifier', np.where(finite, 0, np.nan), 'use another protocol or learning rate')
  top1 = [percent(row) for row in before < 1]
  mean, std = mean_and_spread(top1)
  top5 = percent(before < 5)
  return Result({**report, 'top1': mean, 'top1_std': std, 'top1_seeds': top1, 'top5': top5}, predictions)


def fit(
  train_x: ArrayLike,
  train_y: ArrayLike,
  test_x: ArrayLike,
  test_y: ArrayLike,
  protocol: str,
  *,
  seeds: Sequence[int] = (0,),
  learning_rates: Sequence[float] | None = None,
) -> Result:
  """Trains the linear classifier of a paper's protocol (`PROTOCOLS`).  [n, d], [n], [m, d], [m] -> Result

  Args:
    seeds: for the initial weights and the order of examples.
    learning_rates: candidates that replace the protocol's learning rate, at its batch size. If there are several, the
      one with the highest mean accuracy on a held-out tenth of the training set is used to train on the whole set. The
      test set is not used for this choice.
  """
  require_choice('protocol', protocol, PROTOCOLS)
  settings = PROTOCOLS[protocol]
  rates = [settings.learning_rate] if learning_rates is None else np.ravel(learning_rates).tolist()
  require('learning_rates', rates, lambda x: min(x) > 0, 'at least one positive number')
  require_seeds(seeds)
  train_x, train_y, test_x, test_y = _inputs(train_x, train_y, test_x, test_y)
  train_x, test_x = _prepare(train_x, test_x, scale=settings.scale)
  num_classes = int(train_y.max()) + 1
  seeds = [int(seed) for seed in seeds]

  def train(x, y, rates):
    """Parameters [seeds · rates, ...], grouped by seed."""
    batch, scale = _batch(settings, len(x))
    seeds_, rates_ = jnp.asarray(seeds, jnp.uint32), scale * jnp.asarray(rates, jnp.float32)
    kernels = jnp.asarray(initial_kernels(seeds, x.shape[1], num_classes))
    params = _train(x, jnp.asarray(y), seeds_, kernels, rates_, protocol=settings, batch=batch)
    return jax.tree.map(lambda p: p.reshape(-1, *p.shape[2:]), params)

  sweep = None
  if len(rates) > 1:
    held_out = np.random.default_rng(0).permutation(len(train_x)) < max(1, len(train_x) // 10)
    params = train(train_x[~held_out], train_y[~held_out], rates)
    _, before, _ = _predict(params, train_x[held_out], jnp.asarray(train_y[held_out]))
    accuracy = 100 * (np.asarray(before).reshape(len(seeds), len(rates), -1) < 1).mean(axis=(0, 2))
    sweep = dict(zip(rates, accuracy.tolist(), strict=True))
    rates = [rates[int(accuracy.argmax())]]
  batch, scale = _batch(settings, len(train_x))
  report = {'protocol': protocol, **settings.settings(), 'batch': batch, 'learning_rate': rates[0]}
  report |= {'learning_rate_scale': scale, 'held_out_top1': sweep, 'seeds': seeds}
  return _result(report, train(train_x, train_y, rates), test_x, test_y)


@jax.jit
def fit_logistic(
  x: jax.Array, targets: jax.Array, penalty: jax.typing.ArrayLike, steps: jax.typing.ArrayLike
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Runs L-BFGS from zero until the gradient is small or `steps` steps are taken.  -> parameters, steps taken

  The steps are taken in the principal axes of x, each scaled by the curvature of the loss along it. The minimum is the
  same, and L-BFGS needs two to five times fewer steps, unless the classes are almost separable.
  """
  mean = x.mean(axis=0)
  centered = x - mean[None]
  variances, axes = jnp.linalg.eigh(jnp.matmul(centered.T, centered, precision=HIGHEST) / len(x))
  rotated = jnp.matmul(centered, axes, precision=HIGHEST)
  curvature = variances / 4 + penalty  # 1/4 bounds the second derivative of the cross-entropy
  scales = jax.lax.rsqrt(jnp.maximum(curvature, 1e-6 * curvature.max() + jnp.finfo(x.dtype).tiny))[:, None]
  params = {'kernel': jnp.zeros((x.shape[1], targets.shape[1])), 'bias': jnp.zeros(targets.shape[1])}
  solver = optax.lbfgs()

  def loss(params):
    kernel = scales * params['kernel']
    entropy = _cross_entropy({'kernel': kernel, 'bias': params['bias']}, rotated, targets)
    return entropy + 0.5 * penalty * jnp.sum(jnp.square(kernel))

  value_and_grad = optax.value_and_grad_from_state(loss)
  steepest = lambda grads: jnp.maximum(*(jnp.abs(grads[name]).max() for name in ('kernel', 'bias')))

  def step(carry):
    params, state, _, count = carry
    value, grads = value_and_grad(params, state=state)
    updates, state = solver.update(grads, state, params, value=value, grad=grads, value_fn=loss)
    return optax.apply_updates(params, updates), state, steepest(grads), count + 1

  def unfinished(carry):
    return (carry[2] > 1e-5) & (carry[3] < steps)

  start = (params, solver.init(params), jnp.asarray(jnp.inf), jnp.asarray(0))
  params, _, _, count = jax.lax.while_loop(unfinished, step, start)
  kernel = jnp.matmul(axes, scales * params['kernel'], precision=HIGHEST)
  return {'kernel': kernel, 'bias': params['bias'] - jnp.matmul(mean, kernel, precision=HIGHEST)}, count


def logistic(
  train_x: ArrayLike,
  train_y: ArrayLike,
  test_x: ArrayLike,
  test_y: ArrayLike,
  *,
  penalty: float | None = None,
  steps: int = 2000,
) -> Result:
  """Multinomial logistic regression by L-BFGS, without learning rate or seed.  [n, d], [n], [m, d], [m] -> Result

  Minimizes the mean cross-entropy + ½ penalty ‖W‖² on features scaled to a mean squared coordinate of 1.

  Args:
    penalty: by default 1/n, which corresponds to C = 1 in scikit-learn, or to C = 2 if there are two classes, because
      scikit-learn then fits one vector of weights instead of two.
  """
  train_x, train_y, test_x, test_y = _inputs(train_x, train_y, test_x, test_y)
  penalty = 1 / len(train_x) if penalty is None else penalty
  require('penalty', penalty, lambda x: x >= 0, 'at least 0')
  train_x, test_x = _prepare(train_x, test_x, scale='coordinate')
  targets = jax.nn.one_hot(jnp.asarray(train_y), int(train_y.max()) + 1)
  params, count = fit_logistic(train_x, targets, penalty, steps)
  report = {'protocol': 'logistic', 'penalty': penalty, 'steps': int(count), 'converged': int(count) < steps}
  return _result(report, jax.tree.map(lambda p: p[None], params), test_x, test_y)


@jax.jit
def _gram_and_cross(x, targets):
  """XᵀX and Xᵀ(Y − mean of Y).  [n, d], [n, c] -> [d, d], [d, c]"""
  return tuple(jnp.matmul(x.T, y, precision=HIGHEST) for y in (x, targets - targets.mean(axis=0, keepdims=True)))


def ridge(
  train_x: ArrayLike, train_y: ArrayLike, test_x: ArrayLike, test_y: ArrayLike, *, penalty: float = 1e-3
) -> Result:
  """Ridge regression on one-hot labels, in closed form.  [n, d], [n], [m, d], [m] -> Result

  Minimizes the mean of ‖xᵀW + b − y‖² + penalty ‖W‖² on features scaled to a mean squared coordinate of 1.
  """
  train_x, train_y, test_x, test_y = _inputs(train_x, train_y, test_x, test_y)
  require_positive(penalty=penalty)
  train_x, test_x = _prepare(train_x, test_x, scale='coordinate')
  targets = jax.nn.one_hot(jnp.asarray(train_y), int(train_y.max()) + 1)
  gram, cross = (np.asarray(x, np.float64) / len(train_x) for x in _gram_and_cross(train_x, targets))
  kernel = scipy.linalg.solve(gram + penalty * np.eye(len(gram)), cross, assume_a='pos')
  params = {'kernel': jnp.asarray(kernel, jnp.float32), 'bias': targets.mean(axis=0)}
  report = {'protocol': 'ridge', 'penalty': penalty}
  return _result(report, jax.tree.map(lambda p: p[None], params), test_x, test_y)


WITHOUT_SEEDS: dict[str, Callable[..., Result]] = {'logistic': logistic, 'ridge': ridge}
CHOICES = ('', *WITHOUT_SEEDS, *PROTOCOLS)  # of eval.linear


def evaluate(name: str, *data: ArrayLike, seeds: Sequence[int]) -> Result:
  """Trains and tests the classifier selected by `eval.linear`.  train x and y, test x and y -> Result"""
  classifier = WITHOUT_SEEDS.get(name) or functools.partial(fit, protocol=name, seeds=seeds)
  return classifier(*data)
