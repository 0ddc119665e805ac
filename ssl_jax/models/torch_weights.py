"""Converts weights to torch's names and layouts, and loads them from a safetensors file. Nothing is unpickled.

Names are those of torchvision for a ResNet, timm for a ViT, transformers for BERT, and OpenAI for CLIP's text encoder.
AlexNet and the heads keep the names that they have here.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ssl_jax.models.encoder import Encoder

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
  (r'^positional_embedding\.weight', 'positional_embedding'),
  (r'^resblocks_(\d+)\.qkv\.', r'transformer.resblocks.\1.attn.in_proj_'),
  (r'^resblocks_(\d+)\.proj\.', r'transformer.resblocks.\1.attn.out_proj.'),
  (r'^resblocks_(\d+)\.(c_\w+)\.', r'transformer.resblocks.\1.mlp.\2.'),
  (r'^resblocks_(\d+)\.(ln_\d)\.', r'transformer.resblocks.\1.\2.'),
)
# From torchvision's names to those of detectron2's R50-C4, applied in this order.
_DETECTRON2 = (
  (r'\bdownsample\.0\.', 'shortcut.'),
  (r'\bdownsample\.1\.', 'shortcut.norm.'),
  (r'\bbn(\d)\.', r'conv\1.norm.'),
  (r'^layer4\.', 'roi_heads.res5.'),
  (r'^layer(\d)\.', lambda found: f'backbone.res{int(found[1]) + 1}.'),
  (r'^conv1\.', 'backbone.stem.conv1.'),
)
_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}  # the axes of our kernels in torch's order: IO to OI, HWIO to OIHW

# Tensors that a torch file may hold besides the weights of the encoder: torchvision's classifier, the step counter of
# batch norm, and the pretraining heads of BERT.
_IGNORED = re.compile(r'fc\.(weight|bias)|.*\.num_batches_tracked|cls\..*|pooler\..*|embeddings\.position_ids')


def to_torch(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Converts {'params': ..., 'batch_stats': ...} to {'layer1.0.conv1.weight': float32 [O, I, H, W], ...}."""
  tensors = {}
  for path, value in traverse_util.flatten_dict(variables).items():
    value = np.asarray(value, np.float32)
    tensors[_name(path)] = np.ascontiguousarray(value.transpose(_axes(path, value.ndim)))
  return tensors


def to_detectron2(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Renames the tensors of a bottleneck ResNet for detectron2's Faster and Mask R-CNN with R50-C4.

  'layer1.0.bn1.weight' becomes 'backbone.res2.0.conv1.norm.weight'. The last stage, res5, is part of the box head.
  """
  renamed = {}
  for name, tensor in tensors.items():
    for ours, theirs in _DETECTRON2:
      name = re.sub(ours, theirs, name)
    renamed[name] = tensor
  return renamed


def load(path: str | os.PathLike[str], encoder: Encoder, size: int) -> dict[str, Any]:
  """Loads {'params': ..., 'batch_stats': ...} of the encoder from a safetensors file with torch's names.

  `size` is the input size: pixels per side of an image, or tokens of a sentence. The file must contain every weight of
  the encoder in the right shape, and nothing else but constants of the encoder and tensors that match `_IGNORED`.
  """
  tensors = {encoder.torch_name(name): tensor for name, tensor in _read(path).items()}
  inputs = encoder.example(size)
  variables = jax.eval_shape(lambda: encoder.init(jax.random.key(0), inputs, train=False))
  expected = traverse_util.flatten_dict(variables)
  paths = {_name(place): place for place in expected}
  fixed = encoder.torch_constants(size)
  key = f'init = {str(path)!r}'
  fix = 'give a file of this encoder, or set model to the encoder of the file'
  if spare := [name for name in tensors if name not in paths and name not in fixed and not _IGNORED.fullmatch(name)]:
    first = {name.partition('.')[0] for name in tensors}
    fix = f'remove the prefix {"".join(first) + "."!r} from the names' if len(first) == 1 else fix  # by DataParallel
    raise ValueError(f'{key} has {_few(spare)}, which the encoder does not have: {fix}')
  if missing := [name for name in paths if name not in tensors]:
    raise ValueError(f'{key} lacks {_few(missing)} of the encoder: {fix}')
  found = {}
  for name, place in paths.items():
    value, shape = tensors[name], expected[place].shape
    axes = _axes(place, len(shape))
    there, here = list(value.shape), [shape[axis] for axis in axes]
    if there != here:
      raise ValueError(f'{key} has {name!r} of shape {there}, and the encoder needs {here}: {fix}')
    with np.errstate(over='ignore'):
      kept = value.astype(np.float32)
    if not jnp.issubdtype(value.dtype, jnp.floating) or not np.isfinite(kept).all():
      raise ValueError(f'{key} has {name!r} ({value.dtype}), which must hold only finite floats: give another file')
    if place[-1] == 'var' and (kept < 0).any():
      raise ValueError(f'{key} has negative values in the variance {name!r}: give another file')
    found[place] = np.ascontiguousarray(kept.transpose(np.argsort(axes)))
  for name, value in fixed.items():
    if name in tensors and (tensors[name].shape != value.shape or not np.allclose(tensors[name], value, atol=1e-5)):
      raise ValueError(f'{key} has {name!r} that differs from the fixed one of this encoder: give another file')
  return traverse_util.unflatten_dict(found)


def _read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  import safetensors  # only needed here
  import safetensors.numpy

  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise ValueError(f'init = {str(path)!r} is not a file: give a safetensors file, such as that of --mode=export')
  try:
    return safetensors.numpy.load_file(file)
  except (safetensors.SafetensorError, AttributeError) as error:  # AttributeError: a dtype that numpy lacks
    why = str(error).splitlines()[0]
    raise ValueError(
      f'init = {str(path)!r} is not a complete safetensors file of floats ({why}): give model.safetensors of '
      '--mode=export, or save a state dict with safetensors.torch.save_file'
    ) from error


def _name(path: tuple[str, ...]) -> str:
  """('params', 'layer1_0', 'conv1', 'kernel') -> 'layer1.0.conv1.weight'"""
  _, *modules, leaf = path
  name = '.'.join([*modules, _LEAVES.get(leaf, leaf)])
  for ours, theirs in _MODULES:
    name = re.sub(ours, theirs, name)
  return name


def _axes(path: tuple[str, ...], rank: int) -> tuple[int, ...]:
  return _AXES[rank] if path[-1] == 'kernel' else tuple(range(rank))


def _few(names: list[str]) -> str:
  return repr(names[0]) + (f' and {len(names) - 1} more' if len(names) > 1 else '')
