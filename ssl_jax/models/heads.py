"""Heads between the encoder and the loss: projectors, predictors and prototypes."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax import registry
from ssl_jax.arrays import normalize, to_float32
from ssl_jax.models.norm import BatchNorm

BATCH_NORM = ('none', 'hidden', 'all')  # after no layer, after all but the last, after all
_WIDEST = 2**24  # maximum width of a layer
_LINEAR = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')  # torch.nn.Linear's: U(±1/√fan-in)


def _require_widths(features: Any) -> None:
  width = lambda x: x is None or (registry.is_whole(x) and 1 <= x <= _WIDEST)
  holds = lambda widths: 0 < len(widths) <= 100 and all(map(width, widths))
  registry.require('features', features, holds, 'layer widths, such as (512, 128); None is the width of the input')


class MLP(nn.Module):
  """Linear layers of widths `features`, with batch norm and an activation between them.  [N, D] -> [N, features[-1]]

  A width of None is the width of the input. `batch_norm` says which layers are followed by batch norm: 'none', 'hidden'
  (all but the last) or 'all'. A layer followed by batch norm has no bias, because batch norm would remove it. All other
  layers have a bias, except the last if `last_bias` is False. `last_affine` is whether batch norm after the last layer
  has a scale and a bias.
  """

  features: tuple[int | None, ...]
  batch_norm: str = 'hidden'
  last_affine: bool = True
  last_bias: bool = True
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  kernel_init: nn.initializers.Initializer = _LINEAR
  dtype: DTypeLike = jnp.float32
  axis_name: str | None = None

  def __post_init__(self) -> None:
    registry.require_choice('batch_norm', self.batch_norm, BATCH_NORM)
    _require_widths(self.features)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    chex.assert_rank(x, 2)
    x = x.astype(self.dtype)
    widths = [x.shape[-1] if width is None else width for width in self.features]
    for i, width in enumerate(widths, start=1):
      last = i == len(self.features)
      norm = self.batch_norm == 'all' or (self.batch_norm == 'hidden' and not last)
      bias = not norm and (self.last_bias or not last)
      x = nn.Dense(width, use_bias=bias, kernel_init=self.kernel_init, dtype=self.dtype, name=f'fc{i}')(x)
      if norm:
        affine = self.last_affine or not last
        x = BatchNorm(axis_name=self.axis_name, affine=affine, name=f'bn{i}')(x, train)
      if not last:
        x = self.activation(x)
    return to_float32(x)


class Prototypes(nn.Module):
  """Cosine similarities to `number` learned unit vectors.  [N, D] -> [N, number] in float32

  The prototypes of SwAV (Caron et al. 2020) and the last layer of DINO (Caron et al. 2021): both the features and the
  weights are normalized.
  """

  number: int

  def __post_init__(self) -> None:
    registry.require('number', self.number, lambda x: 1 <= x <= _WIDEST, f'at least 1 and at most {_WIDEST}')
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    del train
    chex.assert_rank(x, 2)
    kernel = self.param('kernel', _LINEAR, (x.shape[-1], self.number))
    return jnp.matmul(normalize(x), normalize(kernel, axis=0), precision=jax.lax.Precision.HIGHEST)


class DINOHead(nn.Module):
  """An MLP to a bottleneck, then prototypes (Caron et al. 2021, App. C).  [N, D] -> [N, prototypes]

  The paper uses batch norm in the head ('hidden') if the encoder has batch norm, and none with a ViT.
  """

  features: tuple[int, ...] = (2048, 2048, 256)
  prototypes: int = 65536
  batch_norm: str = 'none'
  dtype: DTypeLike = jnp.float32
  axis_name: str | None = None

  def __post_init__(self) -> None:
    _require_widths(self.features)
    registry.require('prototypes', self.prototypes, lambda x: 1 <= x <= _WIDEST, f'at least 1 and at most {_WIDEST}')
    registry.require_choice('batch_norm', self.batch_norm, BATCH_NORM)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    gelu = lambda y: nn.gelu(y, approximate=False)
    init = nn.initializers.normal(0.02)  # the authors truncate at ±2, i.e. at 100 standard deviations
    settings: dict[str, Any] = dict(activation=gelu, kernel_init=init, dtype=self.dtype, axis_name=self.axis_name)
    mlp = MLP(self.features, self.batch_norm, name='mlp', **settings)
    return Prototypes(self.prototypes, name='prototypes')(mlp(x, train), train)


class Pooler(nn.Module):
  """BERT's pooler: the tanh of a linear layer that keeps the width.  [N, D] -> [N, D]"""

  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    del train
    chex.assert_rank(x, 2)
    kernel_init = nn.initializers.normal(0.02)
    return to_float32(jnp.tanh(nn.Dense(x.shape[-1], kernel_init=kernel_init, dtype=self.dtype, name='fc')(x)))


HEADS: dict[str, Callable[..., nn.Module]] = {
  # SimCLR in DySTreSS (Manna et al. 2024, App. A.1): 512-512-128 on ResNet-18.
  'simclr': functools.partial(MLP, features=(None, 128), batch_norm='all'),
  'moco': functools.partial(MLP, features=(None, 128), batch_norm='none'),
  # Lee 2025, A.3.1 and A.4.1: batch norm after every layer, ReLU between them.
  'balanced_imagenet': functools.partial(MLP, features=(2048, 2048, 2048), batch_norm='all'),
  'balanced_cifar': functools.partial(MLP, features=(2048, 2048), batch_norm='all'),
  # Grill et al. 2020, sec. 3.3: both the projector and the predictor.
  'byol': functools.partial(MLP, features=(4096, 256), batch_norm='hidden', last_bias=False),
  # Chen & He 2021, sec. 3; the predictor is a bottleneck.
  'simsiam': functools.partial(MLP, features=(2048, 2048, 2048), batch_norm='all', last_affine=False),
  'simsiam_predictor': functools.partial(MLP, features=(512, 2048), batch_norm='hidden'),
  # Chen et al. 2021, sec. 4: 'moco_v3' is the projector of a ResNet, and the predictor. The authors' code omits the
  # last norm of the predictor for a ResNet, as configs/cifar10.py:moco_v3 does.
  'moco_v3': functools.partial(MLP, features=(4096, 256), batch_norm='all', last_affine=False),
  'moco_v3_vit': functools.partial(MLP, features=(4096, 4096, 256), batch_norm='all', last_affine=False),
  # Zbontar et al. 2021, sec. 2.2, and Bardes et al. 2022, sec. 4.2.
  'barlow_twins': functools.partial(MLP, features=(8192, 8192, 8192), batch_norm='hidden', last_bias=False),
  'vicreg': functools.partial(MLP, features=(8192, 8192, 8192), batch_norm='hidden', last_bias=False),
  # Caron et al. 2020: the projector, followed by the prototypes.
  'swav': functools.partial(MLP, features=(2048, 128), batch_norm='hidden'),
  'prototypes': functools.partial(Prototypes, number=3000),
  'dino': DINOHead,
  # Gao et al. 2021 (SimCSE): for training only; evaluations use the features of the encoder.
  'bert': Pooler,
  # Radford et al. 2021 (CLIP): both towers; 1,024 is the width of its ResNet-50.
  'clip': functools.partial(
    MLP,
    features=(1024,),
    batch_norm='none',
    last_bias=False,
    kernel_init=nn.initializers.variance_scaling(1.0, 'fan_in', 'normal'),
  ),
  # fc8 of Wang & Isola's AlexNet.
  'alexnet': functools.partial(MLP, features=(128,), batch_norm='none', kernel_init=nn.initializers.normal(0.02)),
}


def create(name: str, *, dtype: DTypeLike = jnp.float32, axis_name: str | None = None, **fields: Any) -> nn.Module:
  """The head `name` of HEADS; `fields` override its fields."""
  return registry.build('projector', {'name': name, **fields}, HEADS, dtype=dtype, axis_name=axis_name)
