"""Vision transformers (Dosovitskiy et al. 2021) with the settings of MoCo v3 (Chen, Xie & He 2021)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ssl_jax.models.norm import wide

_XAVIER = nn.initializers.xavier_uniform()


def _qkv_init(key, shape, dtype=jnp.float32):
  """Queries, keys and values as three Xavier-uniform matrices side by side; shape (D, 3·D)"""
  parts = [_XAVIER(k, (shape[0], shape[1] // 3), dtype) for k in jax.random.split(key, 3)]
  return jnp.concatenate(parts, axis=1)


def _patch_init(key, shape, dtype=jnp.float32):
  """Xavier-uniform of the projection as a matrix, from a patch's pixels to the width; shape (P, P, 3, D)"""
  return _XAVIER(key, (np.prod(shape[:3]), shape[3]), dtype).reshape(shape)


def sine_position_embedding(height, width, dim, temperature=10000.0):
  """Sines and cosines of the row, then of the column, dim/4 frequencies each; -> [height·width, dim] (MoCo v3)"""
  if dim % 4:
    raise ValueError(f'model.width = {dim} has no sine position embedding: give a multiple of 4')
  omega = temperature ** -(np.arange(dim // 4) / (dim // 4))
  rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing='ij')
  angles = [p.reshape(-1, 1) * omega.reshape(1, -1) for p in (rows, columns)]
  return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)


class LayerNorm(nn.Module):
  """Layer norm over the last axis with float32 statistics, in the dtype of its input; [..., D] -> [..., D]"""

  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x):
    shape = (1,) * (x.ndim - 1) + (-1,)
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:]).reshape(shape)
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:]).reshape(shape)
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(x.dtype)


def attend(query, key, value, real=None, drop=lambda weights: weights):
  """softmax(query·key / sqrt(D))·value of each head, in float32 up to the weights, which `drop` may thin out.

  [N, T, H, D] three times, and which keys are `real`, [N, T] -> [N, T, H·D]
  """
  similarity = jnp.einsum('nqhd,nkhd->nhqk', query, key, preferred_element_type=wide(query).dtype)
  similarity = similarity * query.shape[-1] ** -0.5
  if real is not None:
    similarity = jnp.where(real[:, None, None, :], similarity, jnp.finfo(similarity.dtype).min)
  attended = jnp.einsum('nhqk,nkhd->nqhd', drop(nn.softmax(similarity)).astype(value.dtype), value)
  return attended.reshape(*query.shape[:2], -1)


class Block(nn.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)); [N, T, D] -> [N, T, D]"""

  heads: int
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    n, t, d = x.shape
    dense = lambda features, name, init=_XAVIER: nn.Dense(features, kernel_init=init, dtype=self.dtype, name=name)
    qkv = dense(3 * d, 'qkv', _qkv_init)(LayerNorm(name='norm1')(x)).reshape(n, t, 3, self.heads, d // self.heads)
    query, key, value = (qkv[:, :, i] for i in range(3))
    x = x + dense(d, 'proj')(attend(query, key, value))
    y = dense(4 * d, 'fc1')(LayerNorm(name='norm2')(x))
    return x + dense(d, 'fc2')(nn.gelu(y, approximate=False))


class ViT(nn.Module):
  """Images [N, H, W, 3] -> features [N, width] in float32: the class token after the last layer norm.

  As MoCo v3 has it, the position embedding is a fixed sine and the patch projection stays as it was drawn: no gradient
  reaches `patch_embed`. An optimiser that decays weights must leave it out as well. `remat` computes the inside of each
  block again in the backward pass instead of keeping it: the same numbers in less memory and more time.
  """

  patch: int
  width: int
  depth: int
  heads: int
  remat: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images, train: bool):
    del train
    chex.assert_shape(images, (None, None, None, 3))
    if images.shape[1] % self.patch or images.shape[2] % self.patch:
      size = f'{images.shape[1]} × {images.shape[2]}'
      raise ValueError(f'model.patch = {self.patch} does not divide images of {size} pixels: give one that does')
    if self.width % self.heads:
      raise ValueError(f'model.heads = {self.heads} does not divide model.width = {self.width}: give one that does')
    if self.depth < 1:
      raise ValueError(f'model.depth = {self.depth} must be at least 1')
    patches = (self.patch, self.patch)
    project = nn.Conv(
      self.width,
      patches,
      strides=patches,
      padding='VALID',
      kernel_init=_patch_init,
      dtype=self.dtype,
      name='patch_embed',
    )
    x = jax.lax.stop_gradient(project(images.astype(self.dtype)))
    n, h, w, d = x.shape
    x = x.reshape(n, h * w, d) + jnp.asarray(sine_position_embedding(h, w, d), x.dtype).reshape(1, h * w, d)
    token = self.param('cls_token', nn.initializers.normal(1e-6), (1, 1, d))  # its position embedding is 0
    x = jnp.concatenate([jnp.broadcast_to(token.astype(x.dtype), (n, 1, d)), x], axis=1)
    block = nn.remat(Block) if self.remat else Block
    for i in range(self.depth):
      x = block(self.heads, self.dtype, name=f'blocks_{i}')(x)
    return wide(LayerNorm(name='norm')(x[:, 0]))
