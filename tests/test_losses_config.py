"""From a config to a loss: every legal combination of loss and temperature, and what is refused."""

import ast
import functools
import inspect
import math
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl.testing import absltest, parameterized

from ssl_jax import losses, temperature

PARAMETERS = {
  'hard': dict(fraction=0.5),
  'hard_simple': dict(fraction=0.5),
  'balanced': dict(alpha=2.0, lam=4.0),
  'generalized_nt_xent': dict(alpha=2.0, lam=4.0),
  'hard_negative': dict(beta=1.0),
  'cacr_margin': dict(margin=1.0),
  'triplet': dict(margin=0.5),
}
TEMPERATURES = (
  dict(name='constant', tau=0.2),
  dict(name='cosine', tau_min=dict(name='linear_schedule', start=0.07, end=0.2, epochs=2), tau_max=0.2),
  dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=-0.4, scale=0.7, gradient=True),
  dict(name='linear', tau_min=0.1, tau_max=0.2),
  dict(name='exponential', tau_min=0.1, tau_max=0.2),
  dict(name='monotonic_cosine', tau_min=0.1, tau_max=dict(name='learnable', tau=0.2, tau_min=0.15)),
  dict(name='linear_schedule', start=0.1, end=0.2),
  dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=2),
  dict(name='learnable'),
)
WITHOUT = (
  *(
    'simple',
    'hard_simple',
    'balanced',
    'generalized_nt_xent',
    'macl',
    'align_uniform',
    'cacr',
    'cacr_margin',
    'triplet',
  ),
)
POS = np.array([[0.9, 0.4], [-0.1, 0.6]], np.float32)
NEG = np.array([[0.3, -0.2, 0.1], [0.5, 0.0, -0.7]], np.float32)
WHERE = np.array([[True, True, False], [True, True, True]])


def spec_of(name):
  return {'name': name, **PARAMETERS.get(name, {})}


class ConfigTest(chex.TestCase):
  def test_which_losses_take_a_temperature(self):
    without = [name for name in losses.CONTRASTIVE if not losses.from_config(spec_of(name)).takes_temperature]
    self.assertCountEqual(without, WITHOUT)

  @parameterized.parameters(*(name for name in losses.CONTRASTIVE if name not in WITHOUT))
  def test_every_temperature_goes_into_every_loss_that_has_one(self, name):
    loss = losses.from_config(spec_of(name))
    schedules = [temperature.from_config(spec, total_steps=10) for spec in TEMPERATURES]

    def total(pos, params, step):
      taus = [schedule.at(p, step) for schedule, p in zip(schedules, params, strict=True)]
      return sum(loss(pos, NEG, tau, where=WHERE).sum() for tau in taus)

    params = [schedule.init() for schedule in schedules]
    # It is enough to trace them together: the values are those of the functions, which have tests of their own.
    value, (gradient, _) = jax.eval_shape(jax.value_and_grad(total, argnums=(0, 1)), POS, params, 3)
    self.assertEqual((value.shape, gradient.shape), ((), POS.shape))
    direct = functools.partial(losses.CONTRASTIVE[name], **PARAMETERS.get(name, {}))
    np.testing.assert_allclose(
      loss(POS, NEG, 0.2, where=WHERE), direct(POS, NEG, temperature=0.2, where=WHERE), rtol=1e-6
    )
    with self.assertRaisesRegex(ValueError, f"^temperature = None, but the loss '{name}' needs one"):
      loss(POS, NEG, where=WHERE)

  @parameterized.parameters(*WITHOUT)
  def test_the_others_refuse_one_with_the_reason(self, name):
    loss = losses.from_config(spec_of(name))
    with self.assertRaisesRegex(ValueError, f"^the loss '{name}' takes no temperature: \\w+"):
      loss(POS, NEG, 0.2, where=WHERE)
    direct = losses.CONTRASTIVE[name](POS, NEG, **PARAMETERS.get(name, {}), where=WHERE)
    np.testing.assert_allclose(loss(POS, NEG, where=WHERE), direct, rtol=1e-6)

  def test_config_dict(self):
    loss = losses.from_config(ml_collections.ConfigDict(dict(name='balanced', alpha=2.0, lam=4.0)))
    self.assertEqual((loss.name, loss.takes_temperature), ('balanced', False))
    np.testing.assert_allclose(loss(POS, NEG), losses.balanced(POS, NEG, alpha=2.0, lam=4.0), rtol=1e-6)
    spec = ml_collections.ConfigDict(TEMPERATURES[1])
    np.testing.assert_allclose(temperature.from_config(spec).at({}, 1)(jnp.float32(0)), 0.135, rtol=1e-5)

  @parameterized.parameters(
    (dict(name='ballanced'), "loss.name = 'ballanced' is not a known loss: did you mean 'balanced'?"),
    (dict(alpha=1.0), 'loss.name is missing: give one of info_nce, '),
    ('info_nce', "loss = 'info_nce' must be a mapping, such as dict(name='info_nce')"),
    (dict(name='balanced', alpha=2.0), "loss.lam is missing: 'balanced' needs alpha, lam"),
    (
      dict(name='balanced', alpha=2.0, lambd=4.0),
      "loss.lambd = 4.0 is not a parameter of 'balanced': did you mean 'lam'?",
    ),
    (dict(name='info_nce', temperature=0.2), "loss.temperature = 0.2 is not a parameter of 'info_nce': leave it out"),
    (dict(name='balanced', alpha=0.0, lam=4.0), 'loss.alpha = 0.0 must be positive and finite'),
    (dict(name='balanced', alpha='2', lam=4.0), "loss.alpha = '2' must be positive and finite"),
    (dict(name='hard', fraction=1.5), 'loss.fraction = 1.5 must be in (0, 1]'),
    (dict(name='hard_negative', beta=-1.0), 'loss.beta = -1.0 must be at least 0 and finite'),
    (dict(name='hard_negative', beta=1.0, tau_plus=1.0), 'loss.tau_plus = 1.0 must be in [0, 1)'),
    (dict(name='macl', tau0=0), 'loss.tau0 = 0 must be'),
    (dict(name='macl', alpha=-1.5), 'loss.alpha = -1.5 must be at least 0 and finite'),
    (dict(name='cacr', cost='euclid'), "loss.cost = 'euclid' is not a valid choice: did you mean 'euclidean'?"),
    (
      dict(name='cacr', positive_weights='all'),
      "loss.positive_weights = 'all' is not a valid choice: give one of far, near, uniform",
    ),
    (dict(name='cacr', t_neg=0), 'loss.t_neg = 0 must be'),
    (dict(name='cacr', stop_positive_weights='no'), "loss.stop_positive_weights = 'no' must be True or False"),
    (dict(name='cacr_margin', margin=-1.0), 'loss.margin = -1.0 must be at least 0 and finite'),
    (
      dict(name='cacr_margin', margin=1.0, cost='rbf'),
      "loss.cost = 'rbf' is not a valid choice: give one of euclidean, inner",
    ),
    (dict(name='triplet', margin=math.inf), 'loss.margin = inf must be at least 0 and finite'),
    (dict(name='macl', threshold=math.nan), 'loss.threshold = nan must be a finite number'),
    (dict(name='triplet', margin=-0.1), 'loss.margin = -0.1 must be at least 0 and finite'),
    (dict(name='simple', weight=0), 'loss.weight = 0 must be'),
    (dict(name='decoupled_weighted', sigma=0), 'loss.sigma = 0 must be'),
    (dict(name='align_uniform', t=-2), 'loss.t = -2 must be'),
  )
  def test_refusals(self, spec, message):
    with self.assertRaises(ValueError) as caught:
      losses.from_config(spec)
    self.assertStartsWith(str(caught.exception), message)
    self.assertNotIn('\n', str(caught.exception))

  def test_only_what_is_needed_is_named_as_missing(self):
    with self.assertRaisesRegex(ValueError, "^loss.margin is missing: 'cacr_margin' needs margin$"):
      losses.from_config(dict(name='cacr_margin'))


def documented(pattern):
  """The code that starts a row of a table in docs/losses.md and matches the pattern."""
  page = (pathlib.Path(__file__).parents[1] / 'docs' / 'losses.md').read_text()
  return re.findall(f'^\\| `({pattern})`', page, re.MULTILINE)


def documented_specs():
  return [eval(found) for found in documented(r"dict\(name='.*?\)")]


class DocumentationTest(absltest.TestCase):
  def test_values_in_the_tables_are_the_defaults_if_there_are_any(self):
    calls = [(spec.pop('name'), spec) for spec in documented_specs() if spec['name'] in losses.CONTRASTIVE]
    for call in documented(r'losses\.\w+\(.*?\)'):
      tree = ast.parse(call, mode='eval').body
      calls.append((tree.func.attr, {value.arg: ast.literal_eval(value.value) for value in tree.keywords}))
    compared = set()
    for name, values in calls:
      for key, value in values.items():
        default = inspect.signature(getattr(losses, name)).parameters[key].default
        if default is not inspect.Parameter.empty:
          self.assertEqual(value, default, f'{name}.{key}')
          compared.add(f'{name}.{key}')
    self.assertLessEqual({'sigmoid.bias', 'macl.tau0', 'barlow_twins.lam', 'vicreg.covariance'}, compared)

  def test_the_tables_are_complete_and_their_configs_work(self):
    specs = documented_specs()
    of_losses = [spec for spec in specs if spec['name'] in losses.CONTRASTIVE]
    of_temperatures = [spec for spec in specs if spec['name'] not in losses.CONTRASTIVE]
    for spec in of_losses:
      losses.from_config(spec)
    for spec in of_temperatures:
      temperature.from_config(spec)
    self.assertCountEqual([spec['name'] for spec in of_losses], losses.CONTRASTIVE)
    self.assertCountEqual([spec['name'] for spec in of_temperatures], [spec['name'] for spec in TEMPERATURES])


if __name__ == '__main__':
  absltest.main()
