"""Weights under torch's names and in torch's layouts, and back from a safetensors file. Nothing is unpickled.

A ResNet has torchvision's names, a ViT timm's, BERT those of transformers; AlexNet and the heads have their own.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from ssl_jax import models
from ssl_jax.models.vit import ViT, sine_position_embedding

_LEAVES = {'kernel': 'weight', 'embedding': 'weight', 'scale': 'weight', 'mean': 'running_mean', 'var': 'running_var'}
_MODULES = (
  (r'^(layer\d+|blocks)_(\d+)', r'\1.\2'),
  (r'\.downsample_conv\.', '.downsample.0.'),
  (r'\.downsample_bn\.', '.downsample.1.'),
  (r'^patch_embed\.', 'patch_embed.proj.'),
  (r'^(blocks\.\d+)\.(qkv|proj)\.', r'\1.attn.\2.'),
  (r'^(blocks\.\d+)\.(fc\d)\.', r'\1.mlp.\2.'),
  (r'^words\.', 'embeddings.word_embeddings.'),
  (r'^positions\.', 'embeddings.position_embeddings.'),
  (r'^kinds\.', 'embeddings.token_type_embeddings.'),
  (r'^norm0\.', 'embeddings.LayerNorm.'),
  (r'^layer_(\d+)\.(query|key|value)\.', r'encoder.layer.\1.attention.self.\2.'),
  (r'^layer_(\d+)\.attended\.', r'encoder.layer.\1.attention.output.dense.'),
  (r'^layer_(\d+)\.norm1\.', r'encoder.layer.\1.attention.output.LayerNorm.'),
  (r'^layer_(\d+)\.fc1\.', r'encoder.layer.\1.intermediate.dense.'),
  (r'^layer_(\d+)\.fc2\.', r'encoder.layer.\1.output.dense.'),
  (r'^layer_(\d+)\.norm2\.', r'encoder.layer.\1.output.LayerNorm.'),
)
_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}  # of a kernel here, in torch's order: IO to OI, HWIO to OIHW

# What a torch file may have beside an encoder's weights: torchvision's classifier, batch norm's count of steps, and
# what BERT was trained with.
_IGNORED = re.compile(r'fc\.(weight|bias)|.*\.num_batches_tracked|cls\..*|pooler\..*|embeddings\.position_ids')


def to_torch(variables: Mapping) -> dict[str, np.ndarray]:
  """{'layer1.0.conv1.weight': float32 [O, I, H, W], ...} of linen's {'params': ..., 'batch_stats': ...}."""
  tensors = {}
  for path, value in traverse_util.flatten_dict(variables).items():
    value = np.asarray(value, np.float32)
    tensors[_name(path)] = np.ascontiguousarray(value.transpose(_axes(path, value.ndim)))
  return tensors


def constants(encoder: nn.Module, size: int) -> dict[str, np.ndarray]:
  """What is a tensor in torch's file and computed here: the positions of a ViT [1, 1 + patches, D], the token's 0."""
  if not isinstance(encoder, ViT):
    return {}
  side = size // encoder.patch
  positions = sine_position_embedding(side, side, encoder.width)
  return {'pos_embed': np.pad(positions, ((1, 0), (0, 0)))[None].astype(np.float32)}


def load(path: str | os.PathLike, encoder: nn.Module, size: int) -> dict[str, Any]:
  """{'params': ..., 'batch_stats': ...} of the encoder for images of `size`, from a safetensors file of torch's names.

  `size` is in pixels, or in tokens for an encoder of sentences. The file must have every weight of the encoder in its
  shape, and no other, but for `_IGNORED`.
  """
  tensors = _read(path)
  if isinstance(encoder, models.BERT):
    tensors = {_of_old(name): tensor for name, tensor in tensors.items()}
  inputs = models.example(encoder, size)
  variables = jax.eval_shape(lambda: encoder.init(jax.random.key(0), inputs, train=False))
  expected = traverse_util.flatten_dict(variables)
  paths = {_name(place): place for place in expected}
  fixed = constants(encoder, size)
  mend = 'give a file of this encoder, or set model to that of the file'
  if spare := [name for name in tensors if name not in paths and name not in fixed and not _IGNORED.fullmatch(name)]:
    first = {name.partition('.')[0] for name in tensors}
    mend = f'take {"".join(first) + "."!r} off the names' if len(first) == 1 else mend  # of DataParallel and the like
    raise ValueError(f'init = {str(path)!r} has {_few(spare)}, which the encoder has not: {mend}')
  if missing := [name for name in paths if name not in tensors]:
    raise ValueError(f'init = {str(path)!r} lacks {_few(missing)} of the encoder: {mend}')
  found = {}
  for name, place in paths.items():
    value, shape = tensors[name], expected[place].shape
    axes = _axes(place, len(shape))
    there, here = list(value.shape), [shape[axis] for axis in axes]
    if there != here:
      raise ValueError(f'init = {str(path)!r} has {name!r} of shape {there}, and the encoder of {here}: {mend}')
    with np.errstate(over='ignore'):
      kept = value.astype(np.float32)
    if not jnp.issubdtype(value.dtype, jnp.floating) or not np.isfinite(kept).all():
      raise ValueError(f'init = {str(path)!r} has {name!r}, {value.dtype}, not of finite floats: give another file')
    if place[-1] == 'var' and (kept < 0).any():
      raise ValueError(f'init = {str(path)!r} has {name!r} below 0, and it is a variance: give another file')
    found[place] = np.ascontiguousarray(kept.transpose(np.argsort(axes)))
  for name, value in fixed.items():
    if name in tensors and (tensors[name].shape != value.shape or not np.allclose(tensors[name], value, atol=1e-5)):
      raise ValueError(f'init = {str(path)!r} has {name!r} other than the sines of this encoder: give another file')
  return traverse_util.unflatten_dict(found)


def _read(path) -> dict[str, np.ndarray]:
  import safetensors  # only where a file is read
  import safetensors.numpy

  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise ValueError(f'init = {str(path)!r} is no file: give one, such as encoder.safetensors of --mode=export')
  try:
    return safetensors.numpy.load_file(file)
  except (safetensors.SafetensorError, AttributeError) as error:  # the second: of types that numpy has not
    why = str(error).splitlines()[0]
    raise ValueError(
      f'init = {str(path)!r} is no whole safetensors file of floats ({why}): give encoder.safetensors of '
      '--mode=export, or what safetensors.torch.save_file makes of a state dict'
    ) from error


def _of_old(name: str) -> str:
  """Of the names that files of BERT have, those of today."""
  return (
    name.removeprefix('bert.')
    .replace('LayerNorm.gamma', 'LayerNorm.weight')
    .replace('LayerNorm.beta', 'LayerNorm.bias')
  )


def _name(path: tuple[str, ...]) -> str:
  """('params', 'layer1_0', 'conv1', 'kernel') -> 'layer1.0.conv1.weight'"""
  _, *modules, leaf = path
  name = '.'.join([*modules, _LEAVES.get(leaf, leaf)])
  for ours, torch_s in _MODULES:
    name = re.sub(ours, torch_s, name)
  return name


def _axes(path: tuple[str, ...], rank: int) -> tuple[int, ...]:
  return _AXES[rank] if path[-1] == 'kernel' else tuple(range(rank))


def _few(names: list[str]) -> str:
  return repr(names[0]) + (f' and {len(names) - 1} more' if len(names) > 1 else '')
