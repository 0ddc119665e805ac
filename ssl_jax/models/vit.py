"""Vision transformers (Dosovitskiy et al. 2021) with the settings of MoCo v3 (Chen, Xie & He 2021)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax.arrays import to_float32
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.transformer import LayerNorm, attend, require_sizes
from ssl_jax.registry import require

_XAVIER = nn.initializers.xavier_uniform()


def _qkv_init(key, shape, dtype=jnp.float32):
  """Three Xavier-uniform matrices side by side, for queries, keys and values; shape (D, 3·D)"""
  parts = [_XAVIER(k, (shape[0], shape[1] // 3), dtype) for k in jax.random.split(key, 3)]
  return jnp.concatenate(parts, axis=1)


def _patch_init(key, shape, dtype=jnp.float32):
  """Xavier-uniform for the matrix that maps the pixels of a patch to D features; shape (P, P, 3, D)"""
  return _XAVIER(key, (np.prod(shape[:3]), shape[3]), dtype).reshape(shape)


def sine_position_embedding(height: int, width: int, dim: int, temperature: float = 10000.0) -> np.ndarray:
  """Sines and cosines of the row, then of the column, dim/4 frequencies each (MoCo v3).  -> [height·width, dim]"""
  omega = temperature ** -(np.arange(dim // 4) / (dim // 4))
  rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing='ij')
  angles = [p.reshape(-1, 1) * omega.reshape(1, -1) for p in (rows, columns)]
  return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)


class Block(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)).  [N, T, D] -> [N, T, D]"""

  heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    n, t, d = x.shape
    dense = lambda features, name, init=_XAVIER: nn.Dense(features, kernel_init=init, dtype=self.dtype, name=name)
    qkv = dense(3 * d, 'qkv', _qkv_init)(LayerNorm(name='norm1')(x)).reshape(n, t, 3, self.heads, d // self.heads)
    query, key, value = (qkv[:, :, i] for i in range(3))
    x = x + dense(d, 'proj')(attend(query, key, value))
    y = dense(4 * d, 'fc1')(LayerNorm(name='norm2')(x))
    return x + dense(d, 'fc2')(nn.gelu(y, approximate=False))


class ViT(Encoder):
  """Images [N, H, W, 3] -> features [N, width] in float32: the class token after the last layer norm.

  As in MoCo v3, the position embedding is a fixed sine, and the patch projection keeps its initial weights: no gradient
  reaches `patch_embed`, and `ssl_jax.run.optimizers` exempts it from weight decay. `remat` recomputes each block in the
  backward pass instead of storing its activations: the same results with less memory and more time.
  """

  patch: int
  width: int
  depth: int
  heads: int
  remat: bool = False
  dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    require_sizes(self.width, self.depth, self.heads)
    require('width', self.width, lambda x: x % 4 == 0, 'a multiple of 4, for the sine position embedding')
    super().__post_init__()

  @nn.nowrap
  def torch_constants(self, size: int) -> dict[str, np.ndarray]:
    """The position embedding, [1, 1 + patches, width]; it is 0 for the class token."""
    side = size // self.patch
    positions = sine_position_embedding(side, side, self.width)
    return {'pos_embed': np.pad(positions, ((1, 0), (0, 0)))[None].astype(np.float32)}

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> jax.Array:
    del train
    chex.assert_shape(images, (None, None, None, 3))
    height, width = images.shape[1:3]
    divides = lambda patch: patch >= 1 and height % patch == width % patch == 0
    require('model.patch', self.patch, divides, f'a divisor of the image size, {height} × {width} pixels')
    project = nn.Conv(
      self.width,
      (self.patch, self.patch),
      strides=(self.patch, self.patch),
      padding='VALID',
      kernel_init=_patch_init,
      dtype=self.dtype,
      name='patch_embed',
    )
    x = jax.lax.stop_gradient(project(images.astype(self.dtype)))
    n, h, w, d = x.shape
    x = x.reshape(n, h * w, d) + jnp.asarray(sine_position_embedding(h, w, d), x.dtype).reshape(1, h * w, d)
    token = self.param('cls_token', nn.initializers.normal(1e-6), (1, 1, d))
    x = jnp.concatenate([jnp.broadcast_to(token.astype(x.dtype), (n, 1, d)), x], axis=1)
    block = nn.remat(Block) if self.remat else Block
    for i in range(self.depth):
      x = block(self.heads, self.dtype, name=f'blocks_{i}')(x)
    return to_float32(LayerNorm(name='norm')(x[:, 0]))
