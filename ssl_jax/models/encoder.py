"""The base class of all encoders."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Encoder(nn.Module):
  """Maps inputs to features [N, D] in float32: `apply(variables, inputs, train)`. The inputs are images by default."""

  modality: ClassVar[str] = 'images'  # or 'sentences'

  @nn.nowrap
  def example(self, size: int) -> jax.Array:
    """Two all-zero inputs: images [2, size, size, 3]."""
    return jnp.zeros((2, size, size, 3), jnp.float32)

  @nn.nowrap
  def torch_constants(self, size: int) -> dict[str, np.ndarray]:
    """Constant tensors that a torch file stores, but that this encoder computes."""
    del size
    return {}

  @nn.nowrap
  def torch_name(self, name: str) -> str:
    """The current name of a tensor in a torch file, which may use an older name."""
    return name
