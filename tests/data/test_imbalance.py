import numpy as np
import pytest

from ssl_jax.data import imbalance
from ssl_jax.evals.image_evaluator import ImageEvaluator
from ssl_jax.run import builder
from tests.helpers import tiny

CIFAR10 = np.repeat(np.arange(10, dtype=np.int32), 5000)
CIFAR100 = np.repeat(np.arange(100, dtype=np.int32), 500)
IMAGENET = np.repeat(np.arange(1000, dtype=np.int32), [1300] * 895 + [732] * 105)  # 895 classes have the full size

RULES = {
  'exponential_tail': lambda labels, seed: imbalance.exponential_tail(labels, 0.01, seed=seed),
  'linear_imbalance': lambda labels, seed: imbalance.linear_imbalance(labels, seed=seed),
  'exponential_imbalance': lambda labels, seed: imbalance.exponential_imbalance(labels, seed=seed),
  'pareto': lambda labels, seed: imbalance.pareto(labels, total=8_000, n_max=4000, seed=seed),
  'uniform': lambda labels, seed: imbalance.uniform(labels, 8_000, seed=seed),
}


def shuffled(labels):
  return np.random.default_rng(0).permutation(labels)


@pytest.mark.parametrize('rule', RULES)
def test_a_subset_is_sorted_distinct_and_fixed_by_the_seed(rule):
  labels = shuffled(CIFAR10)
  kept = RULES[rule](labels, 1)
  assert (np.diff(kept) > 0).all() and kept[0] >= 0 and kept[-1] < len(labels)
  np.testing.assert_array_equal(kept, RULES[rule](labels, 1))
  other = RULES[rule](labels, 2)
  assert len(other) == len(kept) and not np.array_equal(other, kept)


@pytest.mark.parametrize(
  'rule, positions',
  [
    ('exponential_tail', 120313011),
    ('linear_imbalance', 893724992),
    ('exponential_imbalance', 352501761),
    ('pareto', 272985810),
    ('uniform', 200361097),
  ],
)
def test_a_seed_always_draws_the_same_images(rule, positions):
  """Another draw would make new runs not comparable with recorded ones. `positions` is their sum."""
  assert RULES[rule](CIFAR10, 0).sum() == positions


def test_exponential_tail_has_the_counts_of_cifar10_lt():
  labels = shuffled(CIFAR10)
  kept = imbalance.exponential_tail(labels, 0.01, seed=0)
  # 5000 · 0.01^(c / 9), rounded down; 12,406 images in all, as in the long-tail literature.
  np.testing.assert_array_equal(np.bincount(labels[kept]), [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50])
  assert len(kept) == 12_406


def test_exponential_tail_has_the_size_of_cifar100_lt():
  kept = imbalance.exponential_tail(CIFAR100, 0.01, seed=0)
  assert len(kept) == 10_847
  assert np.bincount(CIFAR100[kept])[[0, 99]].tolist() == [500, 5]


def test_exponential_tail_takes_n_max_and_never_more_than_there_is():
  labels = np.repeat([0, 1, 2], [100, 4, 100])
  kept = imbalance.exponential_tail(labels, 0.25, n_max=80, seed=0)
  assert np.bincount(labels[kept]).tolist() == [80, 4, 20]  # class 1 would keep 40
  assert len(imbalance.exponential_tail(labels, 1.0, seed=0)) == 204


def test_exponential_tail_draws_every_image_of_a_class_equally_often():
  labels = np.repeat([0, 1], 20)
  hits = np.zeros(40)
  for seed in range(400):
    hits[imbalance.exponential_tail(labels, 0.5, seed=seed)] += 1
  assert (hits[:20] == 400).all()
  assert abs(hits[20:] - 200).max() < 5 * 10  # binomial, standard deviation 10


def test_linear_imbalance_by_hand():
  labels = shuffled(CIFAR10)
  kept = imbalance.linear_imbalance(labels, seed=0)
  assert np.bincount(labels[kept]).tolist() == [500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000]
  labels = np.repeat([0, 1, 2], 10)
  assert np.bincount(labels[imbalance.linear_imbalance(labels, seed=0)]).tolist() == [3, 6, 10]
  kept = imbalance.linear_imbalance(CIFAR100, seed=0)
  assert np.bincount(CIFAR100[kept]).tolist() == np.repeat(np.arange(50, 501, 50), 10).tolist()


def test_exponential_imbalance_by_hand():
  labels = shuffled(CIFAR10)
  kept = imbalance.exponential_imbalance(labels, seed=0)
  # 5000 / e^9, ..., 5000 / e, 5000, rounded down.
  assert np.bincount(labels[kept], minlength=10).tolist() == [0, 1, 4, 12, 33, 91, 248, 676, 1839, 5000]
  # Ten classes at a time keep 500 / e^9, ..., 500.
  kept = imbalance.exponential_imbalance(CIFAR100, seed=0)
  sizes = np.repeat([0, 0, 0, 1, 3, 9, 24, 67, 183, 500], 10)
  assert np.bincount(CIFAR100[kept], minlength=100).tolist() == sizes.tolist() and len(kept) == 7870


def test_pareto_has_the_published_numbers_of_imagenet_lt():
  labels = shuffled(IMAGENET)
  sizes = np.bincount(labels[imbalance.pareto(labels, seed=0)], minlength=1000)
  assert (sizes.sum(), sizes.max(), sizes.min()) == (115_846, 1280, 5)
  # Random classes are large: not the first ones, and not the same ones for another seed.
  other = np.bincount(labels[imbalance.pareto(labels, seed=1)], minlength=1000)
  assert abs(np.corrcoef(sizes, np.arange(1000))[0, 1]) < 0.2 and abs(np.corrcoef(sizes, other)[0, 1]) < 0.2


def test_pareto_sizes_follow_the_law():
  sizes = np.sort(np.bincount(IMAGENET[imbalance.pareto(IMAGENET, seed=0)]))
  # P(x > t) = t^-6 for x = 1 + (n - 5) / s: the logarithm of the survival is a line of slope -6 in log x, for one s.
  rank = np.arange(1000)
  survival = 1 - rank / 1000
  slopes = []
  for scale in np.linspace(300, 900, 601):
    x = np.log1p((sizes - 5) / scale)
    fit = np.polyfit(x[:990], np.log(survival[:990]), 1)
    slopes.append((np.abs(np.polyval(fit, x[:990]) - np.log(survival[:990])).max(), fit[0]))
  residual, slope = min(slopes)
  assert residual < 0.03
  assert slope == pytest.approx(-6, rel=0.1)


def test_uniform_ignores_the_classes():
  labels = np.repeat([0, 1], [9_000, 1_000])
  kept = imbalance.uniform(labels, 5_000, seed=0)
  assert len(kept) == 5_000
  assert abs(np.bincount(labels[kept])[1] - 500) < 5 * 15  # hypergeometric, standard deviation 15


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: imbalance.exponential_tail(CIFAR10, 0.0, seed=0), r'^ratio = 0\.0 must be'),
    (lambda: imbalance.exponential_tail(CIFAR10, 1.01, seed=0), r'^ratio = 1\.01 must be'),
    (lambda: imbalance.exponential_tail(CIFAR10, 100, seed=0), '^ratio = 100 must be'),
    (lambda: imbalance.exponential_tail(CIFAR10, 0.1, n_max=0, seed=0), '^n_max = 0 must be'),
    (lambda: imbalance.pareto(CIFAR10, n_min=-1, seed=0), '^n_min = -1 must be'),
    (lambda: imbalance.pareto(CIFAR10, alpha=0.0, seed=0), r'^alpha = 0\.0 must be'),
    (lambda: imbalance.pareto(CIFAR10, n_max=None, seed=0), '^n_max = None must be the size'),
    (lambda: imbalance.uniform(CIFAR10, 0, seed=0), '^total = 0 must be'),
    (lambda: imbalance.linear_imbalance(np.full(5, -1), seed=0), '^labels must be whole numbers'),
    (lambda: imbalance.linear_imbalance(None, seed=0), '^labels must be whole numbers'),
    (lambda: imbalance.pareto(CIFAR10, n_max=6000, n_min=5, total=9_000, seed=0), '^n_max = 6000 must be lower'),
    (lambda: imbalance.pareto(CIFAR10, n_max=1000, n_min=5, total=9_000, seed=0), r'^total = 9000 must be in \['),
    (lambda: imbalance.pareto(np.zeros(9, int), total=5, n_max=5), "^name = 'pareto' needs at least 2 classes"),
    (lambda: imbalance.uniform(CIFAR10, 50_001, seed=0), '^total = 50001 must be from 1 to the 50000 images'),
  ],
)
def test_impossible_parameters_are_rejected_in_one_line(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (
      dict(name='exponential_tial', ratio=0.1),
      "imbalance.name = 'exponential_tial' .* did you mean 'exponential_tail'",
    ),
    (dict(name='uniform', totl=3), "imbalance.totl = 3 is not a parameter of 'uniform': did you mean 'total'"),
    (dict(name='exponential_tail'), "imbalance.ratio is missing: 'exponential_tail' needs ratio"),
    (dict(name='exponential_tail', ratio=0.0), r'imbalance.ratio = 0.0 must be .* \(0, 1\]'),
    (dict(name='exponential_tail', ratio='a tenth'), "imbalance.ratio = 'a tenth' must be"),
    (dict(name='pareto', n_max=8, n_min=9), 'imbalance.n_min = 9 must be at most n_max = 8'),
    (dict(name='pareto', n_max=None), 'imbalance.n_max = None must be the size'),
    (dict(name='uniform', total=50_001), 'imbalance.total = 50001 must be from 1 to the 50000 images'),
  ],
)
def test_a_wrong_section_is_rejected_in_one_line(spec, message):
  with pytest.raises(ValueError, match=message):
    imbalance.create(spec)(CIFAR10)


def test_the_rule_of_a_config_reduces_only_the_training_images(tmp_path):
  whole = builder.build(tiny(tmp_path))
  chosen = tiny(tmp_path, imbalance=dict(name='linear_imbalance'), batch_size=16)
  thinned = builder.build(chosen)
  np.testing.assert_array_equal(np.bincount(whole.train.labels), [16] * 4)
  np.testing.assert_array_equal(np.bincount(thinned.train.labels), [4, 8, 12, 16])
  kept = imbalance.linear_imbalance(whole.train.labels, seed=0)
  np.testing.assert_array_equal(thinned.train.items, whole.train.items[kept])
  np.testing.assert_array_equal(thinned.eval_test.items, whole.eval_test.items)
  assert imbalance.create(dict(name='none')) is None


def test_evaluations_use_the_kept_training_images_or_all(tmp_path):
  """Of four classes of 16 images, the exponential rule of CACR removes the first."""
  settings = dict(imbalance=dict(name='exponential_imbalance'), batch_size=16)
  kept = builder.build(tiny(tmp_path, **settings))
  assert kept.eval_train is kept.train
  np.testing.assert_array_equal(np.bincount(kept.train.labels), [0, 2, 5, 16])
  with pytest.raises(ValueError, match=r"imbalance.name = 'exponential_imbalance' keeps no image of the classes \[0\]"):
    ImageEvaluator(kept)
  everything = builder.build(tiny(tmp_path, **settings, **{'eval.train_images': 'all'}))
  np.testing.assert_array_equal(np.bincount(everything.train.labels), [0, 2, 5, 16])
  np.testing.assert_array_equal(np.bincount(everything.eval_train.labels), [16] * 4)
  evaluator = ImageEvaluator(everything)
  spaces, labels = evaluator.spaces(everything.devices.replicate(everything.initial_state()))
  assert len(spaces['backbone'].train) == len(labels.train) == 64 and len(spaces['backbone'].test) == 16
