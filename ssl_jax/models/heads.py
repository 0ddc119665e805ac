"""Projectors, predictors and prototypes: what stands between an encoder's features and a method's loss."""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from ssl_jax.models import registry
from ssl_jax.models.norm import BatchNorm, wide

_LINEAR = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')  # torch.nn.Linear's: U(±1/√fan-in)


def l2_normalize(x, axis=-1, epsilon=1e-12):
  """x / ‖x‖ in float32, with a finite gradient at 0."""
  x = wide(x)
  return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), epsilon))


class MLP(nn.Module):
  """Linear layers of widths `features`, with batch norm and an activation between them; [N, D] -> [N, features[-1]]

  A width of None is that of the input. `batch_norm` says after which layers: 'none', 'hidden' (all but the last) or
  'all'. A layer that batch norm follows has no bias (batch norm would remove it); every other one has, but for the last
  where `last_bias` is False. `last_affine` is whether a batch norm after the last layer has scale and bias.
  """

  features: tuple[int | None, ...]
  batch_norm: str = 'hidden'
  last_affine: bool = True
  last_bias: bool = True
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  kernel_init: nn.initializers.Initializer = _LINEAR
  dtype: jnp.dtype = jnp.float32
  axis_name: str | None = None

  @nn.compact
  def __call__(self, x, train: bool):
    chex.assert_rank(x, 2)
    if self.batch_norm not in ('none', 'hidden', 'all'):
      raise ValueError(f"projector.batch_norm = {self.batch_norm!r} does not exist: give 'none', 'hidden' or 'all'")
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
    return wide(x)


class Prototypes(nn.Module):
  """Cosine similarities to `number` learned unit vectors; [N, D] -> [N, number] in float32

  SwAV's prototypes (Caron et al. 2020), and DINO's last layer (Caron et al. 2021): the features are l2-normalised and
  the weights weight-normalised with the magnitude held at 1.
  """

  number: int

  @nn.compact
  def __call__(self, x, train: bool):
    del train
    chex.assert_rank(x, 2)
    kernel = self.param('kernel', _LINEAR, (x.shape[-1], self.number))
    return jnp.matmul(l2_normalize(x), l2_normalize(kernel, axis=0), precision=jax.lax.Precision.HIGHEST)


class DINOHead(nn.Module):
  """An MLP to a bottleneck, then prototypes (Caron et al. 2021, App. C); [N, D] -> [N, prototypes]

  Without batch norm for a ViT, as the paper has it; `batch_norm` 'hidden' on an encoder that has batch norm itself.
  """

  features: tuple[int, ...] = (2048, 2048, 256)
  prototypes: int = 65536
  batch_norm: str = 'none'
  dtype: jnp.dtype = jnp.float32
  axis_name: str | None = None

  @nn.compact
  def __call__(self, x, train: bool):
    gelu = lambda y: nn.gelu(y, approximate=False)
    init = nn.initializers.normal(0.02)  # the authors' code truncates it at ±2, which is 100 deviations
    settings = dict(activation=gelu, kernel_init=init, dtype=self.dtype, axis_name=self.axis_name, name='mlp')
    mlp = MLP(self.features, self.batch_norm, **settings)
    return Prototypes(self.prototypes, name='prototypes')(mlp(x, train), train)


class Pooler(nn.Module):
  """tanh of a linear layer as wide as its input, BERT's pooler; [N, D] -> [N, D]"""

  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, train: bool):
    del train
    chex.assert_rank(x, 2)
    kernel_init = nn.initializers.normal(0.02)
    return wide(jnp.tanh(nn.Dense(x.shape[-1], kernel_init=kernel_init, dtype=self.dtype, name='fc')(x)))


HEADS = {
  # SimCLR as DySTreSS uses it (App. A.1): 512-512-128 on ResNet-18.
  'simclr': functools.partial(MLP, features=(None, 128), batch_norm='all'),
  'moco': functools.partial(MLP, features=(None, 128), batch_norm='none'),
  # "Supervised objectives", A.3.1 and A.4.1: batch norm after every layer, ReLU between them.
  'supervised_imagenet': functools.partial(MLP, features=(2048, 2048, 2048), batch_norm='all'),
  'supervised_cifar': functools.partial(MLP, features=(2048, 2048), batch_norm='all'),
  # Grill et al. 2020, sec. 3.3: projector and predictor alike.
  'byol': functools.partial(MLP, features=(4096, 256), batch_norm='hidden', last_bias=False),
  # Chen & He 2021, sec. 3; the predictor is a bottleneck.
  'simsiam': functools.partial(MLP, features=(2048, 2048, 2048), batch_norm='all', last_affine=False),
  'simsiam_predictor': functools.partial(MLP, features=(512, 2048), batch_norm='hidden'),
  # Chen et al. 2021, sec. 4: 'moco_v3' is the projector of a ResNet and the predictor. The authors' code leaves the
  # last norm out of a ResNet's predictor, as configs/cifar10.py:moco_v3 does.
  'moco_v3': functools.partial(MLP, features=(4096, 256), batch_norm='all', last_affine=False),
  'moco_v3_vit': functools.partial(MLP, features=(4096, 4096, 256), batch_norm='all', last_affine=False),
  # Zbontar et al. 2021, sec. 2.2, and Bardes et al. 2022, sec. 4.2.
  'barlow_twins': functools.partial(MLP, features=(8192, 8192, 8192), batch_norm='hidden', last_bias=False),
  'vicreg': functools.partial(MLP, features=(8192, 8192, 8192), batch_norm='hidden', last_bias=False),
  # Caron et al. 2020: the projector, whose output meets the prototypes.
  'swav': functools.partial(MLP, features=(2048, 128), batch_norm='hidden'),
  'prototypes': functools.partial(Prototypes, number=3000),
  'dino': functools.partial(DINOHead),
  # Gao et al. 2021 (SimCSE): in training alone, the encoder is judged without it.
  'bert': functools.partial(Pooler),
  # fc8 of Wang & Isola's AlexNet.
  'alexnet': functools.partial(MLP, features=(128,), batch_norm='none', kernel_init=nn.initializers.normal(0.02)),
}
NAMES = tuple(HEADS)


def create(name, *, dtype=jnp.float32, axis_name=None, **kwargs):
  """The head `name` of NAMES as a linen module, `apply(variables, x, train)`; `kwargs` are fields to change."""
  return registry.create(HEADS, name, dtype=dtype, axis_name=axis_name, **kwargs)
