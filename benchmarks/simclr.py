"""Our SimCLR on CIFAR-10-sized images: the parts of a run of configs/cifar10.py, without the data."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from configs import cifar10
from ssl_jax import methods
from ssl_jax.methods import Method
from ssl_jax.run import optimizers
from ssl_jax.run.builder import augments_of
from ssl_jax.run.state import State
from ssl_jax.run.update import make_update


def config_of(*options: str):
  """configs/cifar10.py with `options` (`batch_size=512`), in bfloat16 on a GPU and in float32 on a CPU."""
  dtype = 'bfloat16' if timing.device() == 'cuda' else 'float32'
  return cifar10.get_config(','.join([f'dtype={dtype}', *options]))


def parts(config, axis_name=None) -> tuple[Method, Callable, Callable]:
  """The method, seed -> its first state, and seed -> its update."""
  clock = dict(steps_per_epoch=390, total_steps=78_000)  # 200 epochs of 50,000 images
  method = methods.create(config, axis_name=axis_name, **clock)
  rate = optimizers.rate(config.optimizer, batch_size=config.batch_size, **clock)
  optimizer = optimizers.create(config.optimizer, rate)

  @jax.jit
  def init(seed):
    params, batch_stats, extra = method.init(jax.random.key(seed), jnp.zeros((2, 32, 32, 3)))
    return State(jnp.zeros((), jnp.int32), params, batch_stats, extra, optimizer.init(params))

  augments = augments_of(config, on_device=True)[0]
  update = functools.partial(make_update, method, optimizer, rate, augments, axis_name=axis_name)
  return method, init, lambda seed: update(seed=seed)


def random_images(number: int) -> np.ndarray:
  return np.random.default_rng(0).integers(256, size=(number, 32, 32, 3), dtype=np.uint8)
