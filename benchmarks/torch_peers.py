"""SimCLR in torch as a user would write it (He et al. 2016, Chen et al. 2020). Needs torch."""

import itertools
import multiprocessing
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from ml_collections import ConfigDict
from PIL import Image
from torch import nn
from torch.nn import functional as F

from benchmarks import timing


def nt_xent(z1: torch.Tensor, z2: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
  """Cross-entropy on the similarity matrix with masked diagonal.  [B, D], [B, D] -> []"""
  z = F.normalize(torch.cat([z1, z2]))
  logits = z @ z.T / temperature
  logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
  return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


class Block(nn.Module):
  """Two 3×3 convolutions and a shortcut, with in-place operations where torchvision has them."""

  def __init__(self, channels, width, stride):
    super().__init__()
    self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
    self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
    self.shortcut = stride != 1 or channels != width
    if self.shortcut:
      self.downsample_conv = nn.Conv2d(channels, width, 1, stride, bias=False)
      self.downsample_bn = nn.BatchNorm2d(width)

  def forward(self, x):
    y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
    y += self.downsample_bn(self.downsample_conv(x)) if self.shortcut else x
    return F.relu(y, inplace=True)


def projector(channels: int) -> nn.Module:
  """SimCLR's projector, to 128 features."""
  hidden = dict(fc1=nn.Linear(channels, channels, bias=False), bn1=nn.BatchNorm1d(channels), relu=nn.ReLU(True))
  return nn.Sequential(OrderedDict(hidden, fc2=nn.Linear(channels, 128, bias=False), bn2=nn.BatchNorm1d(128)))


def network(width: int = 64) -> nn.Module:
  """ResNet-18 with the CIFAR stem and SimCLR's projector. Module names are the same as ours."""
  encoder = OrderedDict(conv1=nn.Conv2d(3, width, 3, 1, 1, bias=False), bn1=nn.BatchNorm2d(width), relu=nn.ReLU(True))
  channels = width
  for stage in range(4):
    for block in range(2):
      stride = 2 if stage and not block else 1
      encoder[f'layer{stage + 1}_{block}'] = Block(channels, width * 2**stage, stride)
      channels = width * 2**stage
  encoder |= dict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
  return nn.Sequential(OrderedDict(encoder=nn.Sequential(encoder), projector=projector(channels)))


def resnet50() -> nn.Module:
  """torchvision's ResNet-50 with SimCLR's projector. Needs torchvision."""
  from torchvision import models

  model = models.resnet50()
  model.fc = projector(model.fc.in_features)
  return model


def named(tree: Mapping, prefix: str = '') -> dict[str, torch.Tensor]:
  """Our parameters or gradients under torch's names and in torch's layout."""
  found = {}
  for name, x in tree.items():
    if hasattr(x, 'items'):
      found |= named(x, f'{prefix}{name}.')
    else:
      x = np.asarray(x)
      order = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}[x.ndim]
      found[prefix + ('bias' if name == 'bias' else 'weight')] = torch.tensor(x.transpose(order))
  return found


class Views(torch.utils.data.Dataset):
  """Two views of each image, made by a worker of a data loader."""

  def __init__(self, images, view, both=False):
    self.images, self.view, self.both = images, view, both  # both: a call of `view` makes two views

  def __len__(self):
    return len(self.images)

  def __getitem__(self, i):
    image = Image.fromarray(self.images[i])
    return tuple(self.view(image)) if self.both else (self.view(image), self.view(image))


def ready(batch: int, steps: int, size: int) -> Callable:
  """Returns a function that yields `steps` batches of both views, [2B, 3, size, size], already on the device."""
  views = torch.randn(2 * batch, 3, size, size, device=timing.device()).contiguous(memory_format=torch.channels_last)
  return lambda: itertools.repeat(views, steps)


def loader(images: np.ndarray, view: Callable, batch: int, workers: int, both: bool = False) -> Callable:
  """Like `ready`, with views from a data loader. Its workers are idle between passes, while others are timed."""
  several = {}
  if workers:
    server = multiprocessing.get_context('forkserver')
    server.set_forkserver_preload([__name__, 'torchvision.transforms', 'lightly.transforms'])  # once for all workers
    several = dict(persistent_workers=True, multiprocessing_context=server)
  cuda = timing.device() == 'cuda'
  batches = torch.utils.data.DataLoader(
    Views(images, view, both), batch, num_workers=workers, pin_memory=cuda, **several
  )

  def load():
    for views in batches:
      views = torch.cat([v.to(timing.device(), non_blocking=True) for v in views])
      yield views.contiguous(memory_format=torch.channels_last)

  return load


def trainer(
  config: ConfigDict, model: nn.Module, batches: Callable, compile: bool = False, contrast: Callable = nt_xent
) -> Callable:
  """-> a function that trains the model on all of `batches()` with the settings of the config"""
  model = model.to(timing.device(), memory_format=torch.channels_last)
  settings = config.optimizer
  chosen = dict(lr=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay)
  optimizer = torch.optim.SGD(model.parameters(), **chosen)
  model = torch.compile(model, dynamic=False) if compile else model
  torch.backends.cudnn.benchmark = True

  def call():
    for views in batches():
      with torch.autocast(timing.device(), torch.bfloat16, enabled=config.dtype == 'bfloat16'):
        z = model(views)
      loss = contrast(*z.float().chunk(2), config.temperature.tau)
      optimizer.zero_grad()
      loss.backward()
      optimizer.step()
    return loss

  return call


def lightly_trainer(config: ConfigDict, width: int, images: np.ndarray, batch: int, workers: int) -> Callable:
  """-> like `trainer`, end to end with lightly's transform (no blur), loss and projector. Needs lightly."""
  from lightly.loss import NTXentLoss
  from lightly.models.modules import SimCLRProjectionHead
  from lightly.transforms import SimCLRTransform

  loss, wide = NTXentLoss(temperature=config.temperature.tau), 8 * width
  model = nn.Sequential(network(width).encoder, SimCLRProjectionHead(wide, wide, 128))
  batches = loader(images, SimCLRTransform(input_size=32, gaussian_blur=0.0), batch, workers, both=True)
  return trainer(config, model, batches, contrast=lambda z1, z2, tau: loss(z1, z2))
