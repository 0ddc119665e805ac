"""Temperatures: the formulas, what DySTreSS asks of them, their gradients, and configs that are refused."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ssl_jax import temperature

LOW, HIGH = 0.07, 0.2
S = np.linspace(-1, 1, 41).astype(np.float32)


def shifted(s, shift, scale):
  """DySTreSS, Alg. 2, with a shift of 0 in the left half plane."""
  inside = s <= -shift if shift <= 0 else s >= -shift
  return LOW + (HIGH - LOW) / 2 * (1 + math.cos(math.pi / scale * (shift + s))) if inside else HIGH


# name -> (the function, the formula for one similarity)
FUNCTIONS = {
  'constant': (temperature.constant(0.3), lambda s: 0.3),
  'cosine': (
    temperature.cosine(LOW, HIGH),
    lambda s: LOW + 0.5 * (HIGH - LOW) * (1 + math.cos(math.pi * (1 + s))),
  ),
  'shifted_cosine_left': (temperature.shifted_cosine(LOW, HIGH, -0.4, 0.7), lambda s: shifted(s, -0.4, 0.7)),
  'shifted_cosine_right': (temperature.shifted_cosine(LOW, HIGH, 0.2, 0.6), lambda s: shifted(s, 0.2, 0.6)),
  'shifted_cosine_version_3': (temperature.shifted_cosine(LOW, HIGH, 0.0, 0.5), lambda s: shifted(s, 0.0, 0.5)),
  'linear': (temperature.linear(LOW, HIGH), lambda s: LOW + (HIGH - LOW) * abs(s)),
  'exponential': (
    temperature.exponential(LOW, HIGH, 2.0),
    lambda s: LOW + (HIGH - LOW) * (math.exp(2 * abs(s)) - 1) / (math.exp(2) - 1),
  ),
  'monotonic_cosine': (
    temperature.monotonic_cosine(LOW, HIGH),
    lambda s: LOW + 0.5 * (HIGH - LOW) * (1 - math.cos(math.pi * (1 + s) / 2)),
  ),
}


class FunctionTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*FUNCTIONS)
  def test_formula(self, name):
    function, formula = FUNCTIONS[name]
    np.testing.assert_allclose(self.variant(function)(S), [formula(s) for s in S.astype(float)], rtol=1e-5)

  @parameterized.parameters(*FUNCTIONS)
  def test_within_bounds_and_differentiable(self, name):
    function, _ = FUNCTIONS[name]
    tau = function(S)
    self.assertTrue((tau > LOW - 1e-6).all() and (tau < max(HIGH, 0.3) + 1e-6).all(), tau)
    chex.assert_tree_all_finite(jax.jit(jax.vmap(jax.grad(function)))(S))

  @parameterized.parameters('cosine', 'linear', 'exponential')
  def test_proposition_1(self, name):
    """The slope is negative for negative similarities and positive for positive ones."""
    function, _ = FUNCTIONS[name]
    slope = jax.jit(jax.vmap(jax.grad(function)))
    self.assertTrue((slope(S[1:20]) < 0).all() and (slope(S[21:-1]) > 0).all())
    np.testing.assert_allclose(function(jnp.array([-1.0, 0.0, 1.0])), [HIGH, LOW, HIGH], rtol=1e-5)

  def test_monotonic_cosine_grows(self):
    """App. C: least at -1, most at 1."""
    function, _ = FUNCTIONS['monotonic_cosine']
    self.assertTrue((jnp.diff(function(S)) > 0).all())
    np.testing.assert_allclose(function(jnp.array([-1.0, 1.0])), [LOW, HIGH], rtol=1e-5)

  @parameterized.parameters((0.0, 0.5), (0.2, 0.6), (0.4, 0.7), (-0.2, 0.6), (-0.4, 0.7))
  def test_table_15_keeps_the_ends(self, shift, scale):
    """The scale of each row lets the extremities remain at tau_max; the least temperature is inside."""
    function = temperature.shifted_cosine(0.1, 0.2, shift, scale)
    np.testing.assert_allclose(function(jnp.array([-1.0, 1.0])), 0.2, rtol=1e-4)
    least = -shift + scale if shift > 0 else -shift - scale
    np.testing.assert_allclose(function(jnp.float32(least)), 0.1, rtol=1e-4)

  def test_ode_solution(self):
    """Eq. 14 solves Eq. 13, and takes tau_max at the ends with the constants of Eq. 15."""
    delta, k, c, tau_max = 0.3, 2.0, -6.0, 0.2
    function = temperature.ode_solution(delta, k, c)
    for s in (-0.8, -0.1, 0.4, 0.9):
      tau, slope = jax.value_and_grad(function)(s)
      np.testing.assert_allclose(slope, tau / s * (1 - tau * delta * k * jnp.exp(-s / tau)), rtol=1e-4)
    for s in (-1.0, 1.0):
      c = s * delta * k - math.exp(s / tau_max)
      np.testing.assert_allclose(temperature.ode_solution(delta, k, c)(s), tau_max, rtol=1e-4)


class ScaleTest(absltest.TestCase):
  def test_one_temperature_per_similarity(self):
    s = jnp.linspace(-1, 1, 6).reshape(2, 3)
    tau = temperature.cosine(0.1, 0.2)
    np.testing.assert_allclose(temperature.scale(s, tau(s)), temperature.scale(s, tau), rtol=1e-6)

  def test_what_does_not_suit_the_similarities_is_refused(self):
    for tau, message in (
      (jnp.full(3, 0.5), r'^temperature has shape \(3,\), but there are 2 queries: give a number, or one each'),
      (jnp.full((1, 3), 0.5), r'^temperature has shape \(1, 3\), but there are 2 queries'),
      (jnp.float32(-1), '^temperature = -1 must be'),
      (temperature.cosine, r'^temperature = cosine is not called: pass cosine\(\.\.\.\)'),
      (temperature.learnable, '^temperature = learnable is not called'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        temperature.scale(jnp.ones((2, 3)), tau)

  def test_number_array_and_function(self):
    s = jnp.array([[0.2, -0.4], [0.6, 0.8]])
    np.testing.assert_allclose(temperature.scale(s, 0.5), s / 0.5)
    np.testing.assert_allclose(temperature.scale(s, 2), s / 2)
    np.testing.assert_allclose(temperature.scale(s, np.float64(0.5)), s / 0.5)
    np.testing.assert_allclose(temperature.scale(s, jnp.array(0.5)), s / 0.5)
    np.testing.assert_allclose(temperature.scale(s, jnp.array([0.5, 0.1])), s / np.array([[0.5], [0.1]], np.float32))
    np.testing.assert_allclose(temperature.scale(s, lambda s: 1 + s), s / (1 + s), rtol=1e-6)

  def test_gradient_is_stopped_unless_asked_for(self):
    function = temperature.linear(0.1, 0.3)  # tau(0.5) = 0.2, with slope 0.2
    gradient = jax.grad(temperature.scale)
    np.testing.assert_allclose(gradient(0.5, function), 1 / 0.2, rtol=1e-5)
    np.testing.assert_allclose(gradient(0.5, temperature.with_gradient(function)), (0.2 - 0.5 * 0.2) / 0.04, rtol=1e-5)

  def test_gradient_reaches_the_parameters_of_a_function(self):
    gradient = jax.grad(lambda tau_max: temperature.scale(jnp.float32(1.0), temperature.cosine(0.1, tau_max)))
    np.testing.assert_allclose(gradient(0.2), -1 / 0.2**2, rtol=1e-5)


class NumberTest(absltest.TestCase):
  def test_a_number_that_is_no_temperature_is_refused(self):
    for tau in (0, -0.1, float('nan')):
      with self.assertRaisesRegex(ValueError, f'^temperature = {tau} must be'):
        temperature.scale(jnp.ones(3), tau)
      for make in (np.array, jnp.array):
        with self.assertRaisesRegex(ValueError, f'^temperature = {tau} for one of the queries must be'):
          temperature.scale(jnp.ones(3), make([0.1, tau, 0.2]))

  def test_one_temperature_in_an_array_is_a_number(self):
    np.testing.assert_array_equal(temperature.scale(jnp.ones((2, 3)), np.array([0.5])), np.full((2, 3), 2.0))


class ScheduleTest(absltest.TestCase):
  def test_linear(self):
    at = jax.jit(temperature.linear_schedule(0.1, 0.3, epochs=10, steps_per_epoch=4))
    np.testing.assert_allclose([at(step) for step in (0, 10, 40, 99)], [0.1, 0.15, 0.3, 0.3], rtol=1e-6)
    whole = temperature.linear_schedule(0.3, 0.1, steps_per_epoch=4, total_steps=100)
    np.testing.assert_allclose([whole(step) for step in (0, 50, 100)], [0.3, 0.2, 0.1], rtol=1e-6)

  def test_all_of_training_needs_its_length(self):
    for make, name in ((temperature.linear_schedule, 'epochs'), (temperature.cosine_schedule, 'period')):
      with self.assertRaisesRegex(ValueError, f'^{name} = None is the length of training, .*: give {name} or total'):
        make(0.1, 0.3)
    with self.assertRaisesRegex(ValueError, r'^temperature\.tau_min\.epochs = None is the length of training'):
      spec = dict(name='linear_schedule', start=0.1, end=0.2)
      temperature.from_config(dict(name='cosine', tau_min=spec, tau_max=0.2))

  def test_the_value_at_a_step_is_an_argument_inside_jit(self):
    schedule = temperature.linear_schedule(0.1, 0.2, epochs=10)
    tau_min = schedule(5)  # an array: inside jit, jax would trace a comparison
    found = jax.jit(lambda s: temperature.cosine(tau_min, 0.2)(s))(jnp.zeros(2))
    np.testing.assert_allclose(found, 0.15, rtol=1e-6)
    with self.assertRaisesRegex(ValueError, r'^tau_min is a schedule of the step: pass tau_min=schedule\(step\)'):
      temperature.cosine(schedule, 0.2)
    with self.assertRaisesRegex(ValueError, '^temperature is a schedule of the step'):
      temperature.with_gradient(schedule)

  def test_cosine(self):
    """Kukleva et al.: tau_max first, tau_min half a period later."""
    at = jax.jit(temperature.cosine_schedule(0.1, 1.0, period=200, steps_per_epoch=3))
    steps = np.array([0, 150, 300, 600, 7 * 600 + 100])
    expected = 0.1 + 0.9 * (1 + np.cos(2 * np.pi * steps / 600)) / 2
    np.testing.assert_allclose([at(step) for step in steps], expected, rtol=1e-5)

  def test_late_steps_are_exact(self):
    at = temperature.cosine_schedule(0.1, 1.0, period=200, steps_per_epoch=390)
    step = 5_000_003
    expected = 0.1 + 0.9 * (1 + math.cos(2 * math.pi * step / (200 * 390))) / 2
    np.testing.assert_allclose(at(step), expected, rtol=1e-4)


class ConfigTest(chex.TestCase):
  @parameterized.parameters(
    (0.2, 0.2),
    (dict(name='constant', tau=0.2), 0.2),
    (dict(name='constant', tau=1), 1.0),
    (dict(name='constant', tau=dict(name='linear_schedule', start=0.1, end=0.3, epochs=2)), 0.2),
    (dict(name='linear_schedule', start=0.1, end=0.3), 0.15),
    (dict(name='cosine_schedule', tau_min=0.1, tau_max=1.0, period=4), 0.55),
    (dict(name='learnable', tau=0.2), 0.2),
  )
  def test_scalars(self, spec, expected):
    schedule = temperature.from_config(spec, steps_per_epoch=10, total_steps=40)
    at = jax.jit(schedule.at)
    np.testing.assert_allclose(at(schedule.init(), 10), expected, rtol=1e-5)

  def test_none_is_none(self):
    schedule = temperature.from_config(None)
    self.assertEqual(schedule.init(), {})
    self.assertIsNone(schedule.at({}, 0))

  @parameterized.parameters(
    (dict(name='cosine', tau_min=LOW, tau_max=HIGH), 'cosine'),
    (dict(name='shifted_cosine', tau_min=LOW, tau_max=HIGH, shift=-0.4, scale=0.7), 'shifted_cosine_left'),
    (dict(name='linear', tau_min=LOW, tau_max=HIGH), 'linear'),
    (dict(name='exponential', tau_min=LOW, tau_max=HIGH, rate=2), 'exponential'),
    (dict(name='monotonic_cosine', tau_min=LOW, tau_max=HIGH), 'monotonic_cosine'),
  )
  def test_functions(self, spec, name):
    function, _ = FUNCTIONS[name]
    schedule = temperature.from_config(spec)
    self.assertEqual(schedule.init(), {})
    np.testing.assert_allclose(schedule.at({}, 0)(S), function(S), rtol=1e-6)
    self.assertNotIsInstance(schedule.at({}, 0), temperature.with_gradient)
    self.assertIsInstance(temperature.from_config({**spec, 'gradient': True}).at({}, 0), temperature.with_gradient)

  def test_any_argument_can_be_a_schedule(self):
    """DySTreSS's stabilisation: tau_min rises to tau_max."""
    rise = dict(name='linear_schedule', start=0.1, end=0.2, epochs=2)
    spec = dict(name='cosine', tau_min=rise, tau_max=0.2)
    schedule = temperature.from_config(spec, steps_per_epoch=5, total_steps=20)

    @jax.jit
    def least(step):
      return schedule.at({}, step)(jnp.float32(0.0))

    np.testing.assert_allclose([least(step) for step in (0, 5, 10, 20)], [0.1, 0.15, 0.2, 0.2], rtol=1e-5)

    shift = dict(name='linear_schedule', start=0.4, end=-0.4, epochs=2)
    schedule = temperature.from_config(dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=shift, scale=0.7))
    for step, expected in ((0, 0.4), (2, -0.4)):
      function = temperature.shifted_cosine(0.1, 0.2, expected, 0.7)
      np.testing.assert_allclose(jax.jit(lambda s, step: schedule.at({}, step)(s))(S, step), function(S), rtol=1e-4)

  def test_learnable_arguments(self):
    spec = dict(name='cosine', tau_min=0.05, tau_max=dict(name='learnable', tau=0.2, tau_min=0.06))
    schedule = temperature.from_config(spec)
    params = schedule.init()
    chex.assert_trees_all_close(params, {'tau_max': {'log_inverse_tau': jnp.float32(math.log(5))}})
    loss = lambda params: temperature.scale(jnp.float32(1.0), schedule.at(params, 0))
    # d(1 / tau) / d log(1 / tau) = 1 / tau
    gradient = jax.grad(loss)(params)
    chex.assert_trees_all_close(gradient, {'tau_max': {'log_inverse_tau': jnp.float32(5.0)}}, rtol=1e-5)

  def test_learnable_stays_in_its_range_and_comes_back(self):
    schedule = temperature.learnable(tau=0.1, tau_min=0.01, tau_max=1.0)
    np.testing.assert_allclose(schedule.init()['log_inverse_tau'], math.log(10), rtol=1e-6)
    tau = lambda x: schedule.at({'log_inverse_tau': jnp.float32(x)}, 0)
    np.testing.assert_allclose([tau(9.0), tau(-3.0)], [0.01, 1.0], rtol=1e-5)
    up, down = jax.grad(tau), jax.grad(lambda x: -tau(x))  # descent along `up` lowers tau
    self.assertEqual(up(9.0), 0)
    self.assertGreater(down(9.0), 0)
    self.assertEqual(down(-3.0), 0)
    self.assertLess(up(-3.0), 0)
    np.testing.assert_allclose(up(1.0), -math.exp(-1.0), rtol=1e-5)

  @parameterized.parameters(
    dict(name='learnable', tau=0.01),
    dict(name='cosine', tau_min=0.005, tau_max=dict(name='learnable', tau=0.01)),
  )
  def test_devices_that_disagree_at_a_bound_move_a_learnable_temperature_as_one_device_does(self, **spec):
    one, several = temperature.from_config(spec), temperature.from_config(spec, axis_name='i')
    at = lambda schedule, params: temperature.scale(jnp.float32(1.0), schedule.at(params, 0))
    moves = []
    for x in (jnp.array([3.0, -1.0]), jnp.array([-3.0, 1.0])):  # some devices pull outwards, others inwards
      whole = jax.grad(lambda params, x=x: jnp.mean(jax.vmap(lambda x: at(one, params) * x)(x)))(one.init())
      share = jax.grad(lambda params, x: at(several, params) * x)
      mean = jax.vmap(lambda x, share=share: jax.lax.pmean(share(one.init(), x), 'i'), axis_name='i')(x)
      chex.assert_trees_all_close(jax.tree.map(lambda g: g[0], mean), whole, rtol=1e-5)
      moves.append(bool(jax.tree.leaves(whole)[0]))
    self.assertEqual(moves, [True, False])  # inwards only

  def test_the_exponential_function_neither_overflows_nor_divides_by_zero(self):
    s = jnp.array([0.0, -0.5, 0.9, 1.0])
    for rate in (-1e4, -100.0, -88.0, -1e-9, 1e-9, 88.0, 89.0, 100.0, 1e4):
      a, r = np.abs(np.asarray(s, np.longdouble)), np.longdouble(rate)  # e^10,000 is too large for a double
      fraction = (np.expm1(r * a) / np.expm1(r)).astype(np.float64)
      np.testing.assert_allclose(temperature.exponential(0.1, 0.2, rate)(s), 0.1 + 0.1 * fraction, rtol=1e-5)
    through_zero = dict(
      name='exponential', tau_min=0.1, tau_max=0.2, rate=dict(name='linear_schedule', start=-1, end=1)
    )
    schedule = temperature.from_config(through_zero, total_steps=10)
    np.testing.assert_allclose(jax.jit(lambda step: schedule.at({}, step)(s))(5), [0.1, 0.15, 0.19, 0.2], rtol=1e-5)

  @parameterized.parameters(
    (dict(name='cosin', tau_min=0.1, tau_max=0.2), "name = 'cosin' is not a known temperature: did you mean 'cosine'?"),
    (dict(name='zzz'), "name = 'zzz' is not a known temperature: give one of constant, cosine, "),
    (dict(tau=0.1), 'name is missing: give one of constant, '),
    (
      dict(name='cosine', tau_mni=0.1, tau_max=0.2),
      "tau_mni = 0.1 is not a parameter of 'cosine': did you mean 'tau_min'?",
    ),
    (dict(name='cosine', tau_max=0.2), "tau_min is missing: 'cosine' needs tau_min, tau_max"),
    (
      dict(name='cosine', tau_min=0.5, tau_max=0.2),
      'tau_min = 0.5 must not exceed tau_max = 0.2',
    ),
    (dict(name='cosine', tau_min=0.0, tau_max=0.2), 'tau_min = 0.0 must be positive and finite'),
    (dict(name='cosine', tau_min=0.1, tau_max=0.2, gradient='yes'), "gradient = 'yes' must be True or False"),
    (dict(name='constant', tau=-1), 'tau = -1.0 must be positive and finite'),
    (dict(name='constant', tau=float('nan')), 'tau = nan must be'),
    (dict(name='constant', tau='0.2'), "tau = '0.2' is not a number: give a number or {'name': 'linear_schedule'"),
    (dict(name='constant', tau=True), 'tau = True must be a finite number'),
    (
      dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=0.0, scale=0),
      'scale = 0.0 must be positive and finite',
    ),
    (
      dict(name='shifted_cosine', tau_min=0.1, tau_max=0.2, shift=2, scale=0.5),
      'shift = 2.0 must be in [-1, 1]',
    ),
    (dict(name='exponential', tau_min=0.1, tau_max=0.2, rate=0), 'rate = 0.0 must be'),
    (dict(name='linear_schedule', start=0.1, end=0.2, epochs=0), 'epochs = 0 must be'),
    (dict(name='linear_schedule', start='a', end=0.2), "start = 'a' must be a finite number"),
    (dict(name='linear_schedule', start=0.1, end=-0.2), 'end = -0.2 must be positive and finite'),
    (
      dict(name='cosine', tau_min=dict(name='linear_schedule', start=-0.1, end=0.1), tau_max=0.2),
      'tau_min = -0.1 must be positive and finite',
    ),
    (dict(name='cosine_schedule', tau_min=1.0, tau_max=0.1, period=2), 'tau_min = 1.0 must not exceed tau_max = 0.1'),
    (
      dict(name='cosine', tau_min=0.1, tau_max=dict(name='learnable', tau=0.2)),
      'tau_min = 0.1 must not exceed tau_max = 0.01',  # once it is learned
    ),
    (dict(name='learnable', tau=2.0), 'tau = 2.0 must not exceed tau_max = 1.0'),
    (
      dict(name='cosine', tau_min=0.1, tau_max=dict(name='cosine_schedule', tau_min=0.05, tau_max=0.5, period=1 / 32)),
      'tau_min = 0.1 must not exceed tau_max = 0.05',  # half a period after each of the steps that are whole ones
    ),
    (
      dict(name='cosine', tau_min=dict(name='linear_schedule', start=0.1, end=0.3, epochs=5), tau_max=0.2),
      'tau_min = 0.3 must not exceed tau_max = 0.2',  # not at the first step, but at the end of the schedule
    ),
    (
      dict(name='cosine', tau_min=dict(name='linear_schedule', start=0.1, ende=0.3), tau_max=0.2),
      "tau_min.ende = 0.3 is not a parameter of 'linear_schedule': did you mean 'end'?",
    ),
    (
      dict(name='cosine', tau_min=dict(name='cosine', tau_min=0.1, tau_max=0.2), tau_max=0.2),
      "tau_min.name = 'cosine' is not a known tau_min: give one of linear_schedule, cosine_schedule, learnable",
    ),
  )
  def test_refusals(self, spec, message):
    with self.assertRaises(ValueError) as caught:
      temperature.from_config(spec, total_steps=10)
    self.assertStartsWith(str(caught.exception), f'temperature.{message}')
    self.assertNotIn('\n', str(caught.exception))

  def test_a_number_is_checked(self):
    with self.assertRaisesRegex(ValueError, '^temperature = -0.2 must be positive and finite$'):
      temperature.from_config(-0.2)

  def test_direct_calls_check_too(self):
    for call, message in (
      (functools.partial(temperature.cosine, 0.3, 0.2), 'tau_min = 0.3 must not exceed tau_max = 0.2'),
      (functools.partial(temperature.constant, 0), 'tau = 0 must be'),
      (functools.partial(temperature.macl, jnp.ones(2), alpha=-2.0), 'alpha = -2.0 must be at least 0 and finite'),
    ):
      with self.assertRaisesRegex(ValueError, f'^{message}'):
        call()


if __name__ == '__main__':
  absltest.main()
