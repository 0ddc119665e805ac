"""Encoders by name. Each maps images [N, H, W, 3] to features [N, D] in float32: `apply(variables, images, train)`.

Those of sentences take tokens and the words of a key, uint32 [N, T + 2], in the place of images.

Parameters are float32, the compute is in `dtype`, batch-norm statistics are float32 and, under an `axis_name`, global.
"""

import functools

import jax.numpy as jnp

from ssl_jax.models import heads, norm, registry
from ssl_jax.models.alexnet import AlexNet
from ssl_jax.models.bert import BERT, KEY_WORDS
from ssl_jax.models.resnet import BasicBlock, Bottleneck, ResNet
from ssl_jax.models.vit import ViT

__all__ = ['BERT', 'ENCODERS', 'NAMES', 'create', 'example', 'heads', 'norm']

_RESNETS = {
  'resnet18': functools.partial(ResNet, stage_sizes=(2, 2, 2, 2), block=BasicBlock),
  'resnet34': functools.partial(ResNet, stage_sizes=(3, 4, 6, 3), block=BasicBlock),
  'resnet50': functools.partial(ResNet, stage_sizes=(3, 4, 6, 3), block=Bottleneck),
  'resnet101': functools.partial(ResNet, stage_sizes=(3, 4, 23, 3), block=Bottleneck),
}
ENCODERS = {
  **_RESNETS,
  **{f'{name}_cifar': functools.partial(resnet, stem='cifar') for name, resnet in _RESNETS.items()},
  'resnet_tiny': functools.partial(ResNet, stage_sizes=(1, 1, 1), width=32, stem='cifar', stem_stride=2),
  'alexnet_small': functools.partial(AlexNet),
  'vit_s16': functools.partial(ViT, patch=16, width=384, depth=12, heads=12),
  'vit_b16': functools.partial(ViT, patch=16, width=768, depth=12, heads=12),
  'vit_tiny32': functools.partial(ViT, patch=4, width=192, depth=12, heads=3),
  'bert_base': functools.partial(BERT, width=768, depth=12, heads=12),
  'bert_small': functools.partial(BERT, width=512, depth=4, heads=8),
  'bert_tiny': functools.partial(BERT, width=128, depth=2, heads=2),
}
NAMES = tuple(ENCODERS)


def example(encoder, size):
  """Two of what an encoder takes, all zero: images of `size` pixels a side, or sentences of `size` tokens."""
  if isinstance(encoder, BERT):
    return jnp.zeros((2, size + KEY_WORDS), jnp.uint32)
  return jnp.zeros((2, size, size, 3), jnp.float32)


def create(name, *, dtype=jnp.float32, axis_name=None, **kwargs):
  """The encoder `name` of NAMES as a linen module; `kwargs` are its other fields, such as `zero_init_residual`."""
  return registry.create(ENCODERS, name, dtype=dtype, axis_name=axis_name, **kwargs)
