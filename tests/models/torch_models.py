"""The encoders written in torch.nn, and the conversion of their weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class BasicBlock(nn.Module):
  expansion = 1

  def __init__(self, channels, width, stride):
    super().__init__()
    self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
    self.bn2 = nn.BatchNorm2d(width)
    self.downsample = downsample(channels, width, stride)

  def forward(self, x):
    y = torch.relu(self.bn1(self.conv1(x)))
    return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
  expansion = 4

  def __init__(self, channels, width, stride):
    super().__init__()
    self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
    self.bn2 = nn.BatchNorm2d(width)
    self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
    self.bn3 = nn.BatchNorm2d(4 * width)
    self.downsample = downsample(channels, 4 * width, stride)

  def forward(self, x):
    y = torch.relu(self.bn1(self.conv1(x)))
    y = torch.relu(self.bn2(self.conv2(y)))
    return torch.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def downsample(channels, width, stride):
  if stride == 1 and channels == width:
    return nn.Identity()
  return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class ResNet(nn.Module):
  """torchvision's network without its last layer, under torchvision's names."""

  def __init__(self, block, stage_sizes, stem='imagenet', width=64):
    super().__init__()
    cifar = stem == 'cifar'
    self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if cifar else nn.Conv2d(3, width, 7, 2, 3, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    self.pool = nn.Identity() if cifar else nn.MaxPool2d(3, 2, 1)
    channels = width
    for i, size in enumerate(stage_sizes):
      blocks = []
      for j in range(size):
        blocks.append(block(channels, width * 2**i, 2 if i and not j else 1))
        channels = width * 2**i * block.expansion
      self.add_module(f'layer{i + 1}', nn.Sequential(*blocks))
    self.stages = [f'layer{i + 1}' for i in range(len(stage_sizes))]

  def forward(self, x):
    x = self.pool(torch.relu(self.bn1(self.conv1(x))))
    for stage in self.stages:
      x = getattr(self, stage)(x)
    return x.mean((2, 3))


class AlexNet(nn.Module):
  """Wang & Isola's small AlexNet as far as fc7."""

  def __init__(self, size):
    super().__init__()
    channels = 3
    for i, width in enumerate((96, 192, 384, 384, 192), start=1):
      self.add_module(f'conv{i}', nn.Conv2d(channels, width, 3, padding=1, bias=False))
      self.add_module(f'bn{i}', nn.BatchNorm2d(width))
      channels = width
    for _ in range(3):
      size = (size - 3) // 2 + 1
    self.fc6 = nn.Linear(192 * size**2, 4096, bias=False)
    self.bn6 = nn.BatchNorm1d(4096)
    self.fc7 = nn.Linear(4096, 4096, bias=False)
    self.bn7 = nn.BatchNorm1d(4096)

  def forward(self, x):
    for i in range(1, 6):
      x = torch.relu(getattr(self, f'bn{i}')(getattr(self, f'conv{i}')(x)))
      if i in (1, 2, 5):
        x = nn.functional.max_pool2d(x, 3, 2)
    x = torch.relu(self.bn6(self.fc6(x.flatten(1))))
    return torch.relu(self.bn7(self.fc7(x)))


class ViT(nn.Module):
  """torch's pre-norm encoder layers on frozen patches, with the position embedding added one number at a time."""

  def __init__(self, patch, width, depth, heads):
    super().__init__()
    self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
    self.patch_embed = nn.Conv2d(3, width, patch, patch).requires_grad_(False)
    settings = dict(dropout=0.0, activation='gelu', layer_norm_eps=1e-6, batch_first=True, norm_first=True)
    layers = [nn.TransformerEncoderLayer(width, heads, 4 * width, **settings) for _ in range(depth)]
    self.blocks = nn.ModuleList(layers)
    self.norm = nn.LayerNorm(width, eps=1e-6)

  def forward(self, x):
    x = self.patch_embed(x)
    n, width, rows, columns = x.shape
    for row in range(rows):
      for column in range(columns):
        for k in range(width // 4):
          frequency = 10000 ** (-k / (width // 4))
          x[:, k, row, column] += math.sin(row * frequency)
          x[:, width // 4 + k, row, column] += math.cos(row * frequency)
          x[:, width // 2 + k, row, column] += math.sin(column * frequency)
          x[:, 3 * width // 4 + k, row, column] += math.cos(column * frequency)
    x = torch.cat([self.cls_token.expand(n, 1, width), x.flatten(2).transpose(1, 2)], 1)
    for block in self.blocks:
      x = block(x)
    return self.norm(x[:, 0])


def scramble(module, seed=0):
  """Converts to float64 and randomizes weights and running statistics: a 0 or 1 could hide a mistake.

  Norms scale by about a half, so that shortcuts still matter and gradients stay well conditioned.
  """
  generator = torch.Generator().manual_seed(seed)
  module.double()
  with torch.no_grad():
    for parameter in module.parameters():
      fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
      parameter.normal_(0, (2 / fan_in) ** 0.5, generator=generator)
    for child in module.modules():
      if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
        child.running_mean.normal_(0, 0.3, generator=generator)
        child.running_var.uniform_(0.5, 2, generator=generator)
        if child.affine:
          child.weight.add_(0.5)
      elif isinstance(child, nn.LayerNorm):
        child.weight.add_(0.5)
  return module


RENAMES = {
  'downsample.0': 'downsample_conv',
  'downsample.1': 'downsample_bn',
  'self_attn.in_proj_': 'qkv.',
  'self_attn.out_proj': 'proj',
  'linear1': 'fc1',
  'linear2': 'fc2',
}


def from_torch(tensors, dtype=np.float32):
  """A torch state dict, or gradients under the same names, as {'params', 'batch_stats'} of nested dicts.

  Kernels are transposed (OIHW to HWIO, OI to IO); `layer1.0.conv1` becomes layer1_0/conv1, other names as in RENAMES.
  """
  variables = {}
  for name, tensor in tensors.items():
    for old, new in RENAMES.items():
      name = name.replace(old, new)
    *path, leaf = name.split('.')
    if leaf == 'num_batches_tracked':
      continue
    merged = []
    for part in path:
      if part.isdigit():
        merged[-1] += f'_{part}'
      else:
        merged.append(part)
    value = tensor.detach().numpy().astype(dtype)
    collection = 'batch_stats' if leaf.startswith('running') else 'params'
    if value.ndim > 1 and leaf == 'weight':
      leaf, value = 'kernel', value.transpose((2, 3, 1, 0) if value.ndim == 4 else (1, 0))
    leaf = {'weight': 'scale', 'running_mean': 'mean', 'running_var': 'var'}.get(leaf, leaf)
    node = variables.setdefault(collection, {})
    for part in merged:
      node = node.setdefault(part, {})
    node[leaf] = value
  return variables


def images(shape, seed=0):
  """The same images for torch, channels first in float64, and for JAX, channels last in float32."""
  x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return torch.tensor(x.transpose(0, 3, 1, 2) if x.ndim == 4 else x).double(), x


def assert_close(actual, expected, tolerance):
  """Each leaf is within `tolerance` of the reference, relative to its norm; the trees have the same leaves."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), (_, e) in zip(
    jax.tree_util.tree_leaves_with_path(actual), jax.tree_util.tree_leaves_with_path(expected), strict=True
  ):
    assert a.shape == e.shape, (jax.tree_util.keystr(path), a.shape, e.shape)
    error = np.linalg.norm(np.asarray(a, np.float64) - e) / max(np.linalg.norm(e), 1e-12)
    assert error < tolerance, (jax.tree_util.keystr(path), error)


def assert_same_network(module, reference, shape):
  """Outputs in evaluation and training, running statistics and the gradient of every parameter match torch.

  Outputs are compared in float32. Gradients are compared in float64: in float32 a pre-activation within rounding of 0
  may pass one network's ReLU and not the other's, which changes the gradients of a small batch by a percent
  (also between torch in float32 and float64). The loss Σ w·y with random w has no symmetry that hides a wrong gradient.
  """
  reference = scramble(reference)
  x_torch, x = images(shape)
  variables = from_torch(reference.state_dict())
  exact_variables = from_torch(reference.state_dict(), np.float64)

  @jax.jit
  def forward(variables):
    trained, updates = module.apply(variables, x, train=True, mutable=['batch_stats'])
    return module.apply(variables, x, train=False), trained, updates

  @jax.jit
  def backward(variables, x, w):
    def loss(params):
      exact = module.clone(dtype=jnp.float64)
      y, updates = exact.apply({**variables, 'params': params}, x, train=True, mutable=['batch_stats'])
      return (y * w).sum(), (y, updates)

    return jax.grad(loss, has_aux=True)(variables['params'])

  evaluated = reference.eval()(x_torch).detach().numpy()
  trained = reference.train()(x_torch)
  w = np.random.default_rng(1).normal(size=trained.shape)
  (trained * torch.tensor(w)).sum().backward()
  trained = trained.detach().numpy()
  updates = {k: v for k, v in from_torch(reference.state_dict(), np.float64).items() if k == 'batch_stats'}
  gradients = {k: p.grad if p.requires_grad else torch.zeros_like(p) for k, p in reference.named_parameters()}
  gradients = from_torch(gradients, np.float64)['params']

  assert_close(forward(variables), (evaluated, trained, updates), 1e-4)
  with jax.enable_x64(True):
    assert_close(backward(exact_variables, x.astype(np.float64), w), (gradients, (trained, updates)), 1e-9)


class Detectron2(nn.Module):
  """The ResNet of detectron2's R50-C4 models: backbone with stem and res2 to res4, and res5 in the box head.

  As in its code: a convolution holds its norm, the projection is a `shortcut`, and STRIDE_IN_1X1 is False.
  """

  def __init__(self, stage_sizes, width=64):
    super().__init__()
    self.backbone, self.roi_heads = nn.Module(), nn.Module()
    self.backbone.stem = nn.Module()
    self.backbone.stem.conv1 = Detectron2Conv(3, width, 7, 2, 3)
    inputs = width
    for i, blocks in enumerate(stage_sizes):
      owner = self.roi_heads if i == 3 else self.backbone
      stage = []
      for j in range(blocks):
        stage.append(Detectron2Block(inputs, width * 2**i, 2 if i > 0 and j == 0 else 1))
        inputs = 4 * width * 2**i
      setattr(owner, f'res{i + 2}', nn.Sequential(*stage))

  def forward(self, x):
    x = torch.relu(self.backbone.stem.conv1(x))
    x = nn.functional.max_pool2d(x, kernel_size=3, stride=2, padding=1)
    for stage in (self.backbone.res2, self.backbone.res3, self.backbone.res4, self.roi_heads.res5):
      x = stage(x)
    return x


class Detectron2Conv(nn.Conv2d):
  def __init__(self, inputs, outputs, kernel, stride=1, padding=0):
    super().__init__(inputs, outputs, kernel, stride, padding, bias=False)
    self.norm = nn.BatchNorm2d(outputs)

  def forward(self, x):
    return self.norm(super().forward(x))


class Detectron2Block(nn.Module):
  def __init__(self, inputs, width, stride):
    super().__init__()
    self.shortcut = Detectron2Conv(inputs, 4 * width, 1, stride) if inputs != 4 * width else None
    self.conv1 = Detectron2Conv(inputs, width, 1)
    self.conv2 = Detectron2Conv(width, width, 3, stride, 1)
    self.conv3 = Detectron2Conv(width, 4 * width, 1)

  def forward(self, x):
    y = self.conv3(torch.relu(self.conv2(torch.relu(self.conv1(x)))))
    return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))
