"""Complete torch source code of the encoders, for the README of an export.

Each function returns code that defines `encoder`, a torch.nn.Module that loads model.safetensors.
"""

from collections.abc import Callable
from typing import Any

from ssl_jax.models import BERT, CLIPText
from ssl_jax.models.alexnet import AlexNet
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.resnet import Bottleneck, ResNet
from ssl_jax.models.vit import ViT

_BASIC_BLOCK = """
class Block(nn.Module):
  def __init__(self, inputs, width, stride):
    super().__init__()
    self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
    self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
    self.downsample = shortcut(inputs, width, stride)

  def forward(self, x):
    y = self.bn1(self.conv1(x)).relu()
    return (self.bn2(self.conv2(y)) + self.downsample(x)).relu()
"""

_BOTTLENECK = """
class Block(nn.Module):
  def __init__(self, inputs, width, stride):
    super().__init__()
    self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
    self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
    self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
    self.downsample = shortcut(inputs, 4 * width, stride)

  def forward(self, x):
    y = self.bn1(self.conv1(x)).relu()
    y = self.bn2(self.conv2(y)).relu()
    return (self.bn3(self.conv3(y)) + self.downsample(x)).relu()
"""

_RESNET = """
from collections import OrderedDict

import torch
from torch import nn


def conv(inputs, outputs, kernel, stride=1):
  return nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, bias=False)


def shortcut(inputs, outputs, stride):
  if inputs == outputs and stride == 1:
    return nn.Sequential()
  return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

{block}

layers = OrderedDict(conv1=conv(3, {width}, {kernel}, {stride}), bn1=nn.BatchNorm2d({width}), relu=nn.ReLU())
layers['maxpool'] = {maxpool}
inputs = {width}
for i, blocks in enumerate({stage_sizes}):
  width, stage = {width} * 2**i, []
  for j in range(blocks):
    stage.append(Block(inputs, width, stride=2 if i > 0 and j == 0 else 1))
    inputs = {expansion} * width
  layers[f'layer{{i + 1}}'] = nn.Sequential(*stage)
layers['avgpool'], layers['flatten'] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
encoder = nn.Sequential(layers)
"""

_VIT = """
from collections import OrderedDict

import torch
from torch import nn


class Block(nn.Module):
  def __init__(self, width, heads):
    super().__init__()
    self.heads = heads
    self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
    self.attn = nn.ModuleDict(dict(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width)))
    layers = OrderedDict(fc1=nn.Linear(width, 4 * width), act=nn.GELU(), fc2=nn.Linear(4 * width, width))
    self.mlp = nn.Sequential(layers)

  def forward(self, x):
    n, t, d = x.shape
    qkv = self.attn['qkv'](self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
    attended = nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
    x = x + self.attn['proj'](attended.transpose(1, 2).reshape(n, t, d))
    return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
  def __init__(self, size, patch, width, depth, heads):
    super().__init__()
    self.patch_embed = nn.ModuleDict(dict(proj=nn.Conv2d(3, width, patch, patch)))
    self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
    self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
    self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
    self.norm = nn.LayerNorm(width, 1e-6)

  def forward(self, x):
    x = self.patch_embed['proj'](x).flatten(2).transpose(1, 2)
    x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
    return self.norm(self.blocks(x)[:, 0])


encoder = ViT(size={size}, patch={patch}, width={width}, depth={depth}, heads={heads})
"""

_ALEXNET = """
from collections import OrderedDict

import torch
from torch import nn

layers, inputs = OrderedDict(), 3
for i, width in enumerate((96, 192, 384, 384, 192), start=1):
  layers[f'conv{{i}}'] = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
  layers[f'bn{{i}}'], layers[f'relu{{i}}'] = nn.BatchNorm2d(width), nn.ReLU()
  if i in (1, 2, 5):
    layers[f'pool{{i}}'] = nn.MaxPool2d(3, stride=2)
  inputs = width
layers['flatten'], inputs = nn.Flatten(), {flat}
for i in (6, 7):
  layers[f'fc{{i}}'] = nn.Linear(inputs, 4096, bias=False)
  layers[f'bn{{i}}'], layers[f'relu{{i}}'] = nn.BatchNorm1d(4096), nn.ReLU()
  inputs = 4096
encoder = nn.Sequential(layers)
"""

_BERT = """
import torch
from transformers import BertConfig, BertModel

config = BertConfig(
  vocab_size={vocabulary},
  hidden_size={width},
  num_hidden_layers={depth},
  num_attention_heads={heads},
  intermediate_size={hidden},
  max_position_embeddings={positions},
)
encoder = BertModel(config, add_pooling_layer=False)
"""

_CLIP_TEXT = """
from collections import OrderedDict

import torch
from torch import nn


class Block(nn.Module):
  def __init__(self, width, heads):
    super().__init__()
    self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
    self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
    layers = OrderedDict(c_fc=nn.Linear(width, 4 * width), act={activation}, c_proj=nn.Linear(4 * width, width))
    self.mlp = nn.Sequential(layers)

  def forward(self, x):
    y, later = self.ln_1(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    x = x + self.attn(y, y, y, need_weights=False, attn_mask=later)[0]
    return x + self.mlp(self.ln_2(x))


class QuickGELU(nn.Module):
  def forward(self, x):
    return x * torch.sigmoid(1.702 * x)


class CLIPText(nn.Module):
  def __init__(self, width, depth, heads, vocabulary, positions):
    super().__init__()
    self.token_embedding = nn.Embedding(vocabulary, width)
    self.positional_embedding = nn.Parameter(torch.zeros(positions, width))
    self.transformer = nn.ModuleDict(dict(resblocks=nn.Sequential(*(Block(width, heads) for _ in range(depth)))))
    self.ln_final = nn.LayerNorm(width)

  def forward(self, tokens):
    x = self.token_embedding(tokens) + self.positional_embedding[:tokens.shape[1]]
    x = self.ln_final(self.transformer['resblocks'](x))
    last = (tokens != 0).cumsum(1).argmax(1)  # the last token that is not padding
    return x[torch.arange(len(x)), last]


encoder = CLIPText(width={width}, depth={depth}, heads={heads}, vocabulary={vocabulary}, positions={positions})
"""


def _resnet(encoder: ResNet, size: int) -> str:
  del size
  bottleneck, imagenet = encoder.block is Bottleneck, encoder.stem == 'imagenet'
  return _RESNET.format(
    block=_BOTTLENECK if bottleneck else _BASIC_BLOCK,
    expansion=4 if bottleneck else 1,
    width=encoder.width,
    stage_sizes=tuple(encoder.stage_sizes),
    kernel=7 if imagenet else 3,
    stride=encoder.stem_stride or (2 if imagenet else 1),
    maxpool='nn.MaxPool2d(3, stride=2, padding=1)' if imagenet else 'nn.Identity()',
  )


def _vit(encoder: ViT, size: int) -> str:
  sizes = dict(patch=encoder.patch, width=encoder.width, depth=encoder.depth, heads=encoder.heads)
  return _VIT.format(size=size, **sizes)


def _alexnet(encoder: AlexNet, size: int) -> str:
  del encoder
  for _ in range(3):  # 3×3 pooling with stride 2, without padding
    size = (size - 3) // 2 + 1
  return _ALEXNET.format(flat=192 * size**2)


def _bert(encoder: BERT, size: int) -> str:
  del size
  sizes = dict(width=encoder.width, depth=encoder.depth, heads=encoder.heads, hidden=4 * encoder.width)
  return _BERT.format(vocabulary=encoder.vocabulary, positions=encoder.positions, **sizes)


def _clip_text(encoder: CLIPText, size: int) -> str:
  del size
  names = ('width', 'depth', 'heads', 'vocabulary', 'positions')
  activation = {'gelu': 'nn.GELU()', 'quick_gelu': 'QuickGELU()'}[encoder.activation]
  return _CLIP_TEXT.format(activation=activation, **{name: getattr(encoder, name) for name in names})


SOURCES: dict[type[Encoder], Callable[[Any, int], str]] = {
  ResNet: _resnet,
  ViT: _vit,
  AlexNet: _alexnet,
  BERT: _bert,
  CLIPText: _clip_text,
}


def source(encoder: Encoder, size: int) -> str:
  """Python code that defines `encoder` in torch, for inputs of `size` pixels or tokens."""
  if type(encoder) not in SOURCES:
    name = type(encoder).__name__
    raise ValueError(f'the encoder {name} has no torch code: add it to SOURCES in ssl_jax/reporting/torch_code.py')
  return SOURCES[type(encoder)](encoder, size).strip()
