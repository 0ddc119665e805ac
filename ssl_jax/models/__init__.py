"""Encoders by name. Each maps images [N, H, W, 3], or tokenized sentences, to features [N, D] in float32.

Parameters are float32 and the computation is in `dtype`. Batch-norm statistics are float32; with an `axis_name`, they
are those of the global batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ssl_jax import registry
from ssl_jax.models import heads, norm
from ssl_jax.models.alexnet import AlexNet
from ssl_jax.models.bert import BERT
from ssl_jax.models.clip_text import CLIPText
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.resnet import BasicBlock, Bottleneck, ResNet
from ssl_jax.models.vit import ViT

__all__ = ['BERT', 'ENCODERS', 'CLIPText', 'Encoder', 'create', 'heads', 'norm']

_RESNETS = {
  'resnet18': functools.partial(ResNet, stage_sizes=(2, 2, 2, 2), block=BasicBlock),
  'resnet34': functools.partial(ResNet, stage_sizes=(3, 4, 6, 3), block=BasicBlock),
  'resnet50': functools.partial(ResNet, stage_sizes=(3, 4, 6, 3), block=Bottleneck),
  'resnet101': functools.partial(ResNet, stage_sizes=(3, 4, 23, 3), block=Bottleneck),
}
ENCODERS: dict[str, Callable[..., Encoder]] = {
  **_RESNETS,
  **{f'{name}_cifar': functools.partial(resnet, stem='cifar') for name, resnet in _RESNETS.items()},
  'resnet_tiny': functools.partial(ResNet, stage_sizes=(1, 1, 1), width=32, stem='cifar', stem_stride=2),
  'alexnet_small': AlexNet,
  'vit_s16': functools.partial(ViT, patch=16, width=384, depth=12, heads=12),
  'vit_b16': functools.partial(ViT, patch=16, width=768, depth=12, heads=12),
  'vit_tiny32': functools.partial(ViT, patch=4, width=192, depth=12, heads=3),
  'bert_base': functools.partial(BERT, width=768, depth=12, heads=12),
  'bert_small': functools.partial(BERT, width=512, depth=4, heads=8),
  'bert_tiny': functools.partial(BERT, width=128, depth=2, heads=2),
  'clip_text': functools.partial(CLIPText, width=512, depth=12, heads=8),
  'clip_text_tiny': functools.partial(CLIPText, width=128, depth=2, heads=4),
}


def create(name: str, *, dtype: DTypeLike = jnp.float32, axis_name: str | None = None, **fields: Any) -> Encoder:
  """The encoder `name` of ENCODERS; `fields` override its fields, such as `zero_init_residual`."""
  return registry.build('model', {'name': name, **fields}, ENCODERS, dtype=dtype, axis_name=axis_name)
