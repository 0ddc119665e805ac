"""The parts of a run without its data, and configs/cifar10.py with random images."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import timing
from configs import cifar10
from ssl_jax import methods
from ssl_jax.data.modality import modality_of
from ssl_jax.methods import Method
from ssl_jax.run import optimizers
from ssl_jax.run.devices import jit_once
from ssl_jax.run.state import State
from ssl_jax.run.update import make_update


def config_of(*options: str) -> ConfigDict:
  """configs/cifar10.py with `options` such as `batch_size=512`, in bfloat16 on a GPU and float32 on a CPU."""
  dtype = 'bfloat16' if timing.device() == 'cuda' else 'float32'
  return cifar10.get_config(','.join([f'dtype={dtype}', *options]))


def parts(config: ConfigDict, axis_name: str | None = None) -> tuple[Method, Callable, Callable]:
  """(method, seed -> initial state, seed -> update)"""
  clock = dict(steps_per_epoch=390, total_steps=78_000)  # 200 epochs of 50,000 images
  method = methods.create(config, axis_name=axis_name, **clock)
  learning_rate = optimizers.learning_rate(config.optimizer, batch_size=config.batch_size, **clock)
  optimizer = optimizers.create(config.optimizer, learning_rate)

  @jit_once
  def init(seed):
    images = jnp.zeros((2, config.data.image_size, config.data.image_size, 3))
    params, batch_stats, extra = method.init(jax.random.key(seed), images)
    return State(jnp.zeros((), jnp.int32), params, batch_stats, extra, optimizer.init(params))

  training = modality_of(config).views(config, on_device=True).training
  update = functools.partial(make_update, method, optimizer, learning_rate, training, axis_name=axis_name)
  return method, init, lambda seed: update(seed=seed)


def random_images(number: int, size: int = 32) -> np.ndarray:
  """-> uint8 [number, size, size, 3]"""
  return np.random.default_rng(0).integers(256, size=(number, size, size, 3), dtype=np.uint8)
