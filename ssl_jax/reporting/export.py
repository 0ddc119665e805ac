"""Takes the encoder out of a run: weights for torch, a program for jax, and a page that says how to load them."""

import json
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.export
import jax.numpy as jnp
from flax import linen as nn
from ml_collections import ConfigDict

import ssl_jax
from ssl_jax import models
from ssl_jax.evals import features
from ssl_jax.models import torch_weights
from ssl_jax.models.resnet import ResNet
from ssl_jax.models.vit import ViT
from ssl_jax.run.builder import augment_settings, augments_of, input_size, of_text
from ssl_jax.workdir import files
from ssl_jax.workdir.checkpoints import Checkpoints

PLATFORMS = ('cpu', 'cuda')  # that the program is lowered for


def export(config: ConfigDict, workdir: str) -> pathlib.Path:
  """Writes the encoder of a workdir's newest checkpoint, with the weights that evaluations use, to its folder export/.

  Needs neither the training images nor the method: the run's config and its checkpoint say all.
  """
  import safetensors.numpy

  files.read_config(workdir)  # a wrong workdir is not made
  workdir = files.check(workdir, config.to_dict())
  checkpoints = Checkpoints(workdir, config.to_dict())
  state = checkpoints.newest()
  checkpoints.close()
  params, batch_stats = state.evaluated
  parts = {
    name: {'params': params['network'].get(name, {}), 'batch_stats': batch_stats.get(name, {})}
    for name in ('encoder', 'projector')
  }

  encoder = models.create(dtype=jnp.dtype(config.dtype), **config.model)
  size, text = input_size(config), of_text(config)
  _, shown, _ = augments_of(config, on_device=True)
  program = to_program(encoder, parts['encoder'], shown, size if text else features.shown(config))
  about = {
    'model': json.dumps(config.model.to_dict()),
    'step': str(int(state.step)),
    'features': str(program.out_avals[0].shape[1]),
    'ssl_jax': ssl_jax.__version__,
  }
  if text:
    about['tokens'] = str(size)
  else:
    settings, _ = augment_settings(config)
    about |= {'image_size': str(size), 'mean': json.dumps(settings['mean']), 'std': json.dumps(settings['std'])}
  tensors = torch_weights.to_torch(parts['encoder']) | torch_weights.constants(encoder, size)
  head = {f'projector.{name}': tensor for name, tensor in torch_weights.to_torch(parts['projector']).items()}
  written = {
    'encoder.safetensors': safetensors.numpy.save(tensors, about),
    'encoder.jax': bytes(program.serialize()),
    'projector.safetensors': safetensors.numpy.save(
      head, about | {'projector': json.dumps(config.projector.to_dict())}
    ),
    'README.md': (_readme_of_text if text else _readme)(config, encoder, about).encode(),
  }
  if text:
    written['vocab.txt'] = (workdir / 'vocab.txt').read_bytes()
  folder = files.writable(workdir / 'export')
  for name, data in written.items():
    files.write_bytes(folder / name, data)
  what = f'sentences of {size} tokens' if text else f'images of {size} px'
  print(f'{config.model.name} at step {about["step"]}, {what} to {about["features"]} features: {folder}')
  print(f'  {", ".join(files)} (how to load them)')
  return folder


def to_program(encoder: nn.Module, variables: Mapping, shown: Callable, size: int) -> jax.export.Exported:
  """uint8 images [batch, size, size, 3] -> float32 features [batch, D], for any batch, with the weights inside.

  `shown` makes of one image what the encoder sees: the centre crop and the normalisation of evaluations. An encoder of
  sentences takes uint16 tokens [batch, size].
  """
  apply = jax.jit(lambda images: encoder.apply(variables, jax.vmap(shown)(images), train=False))
  text = isinstance(encoder, models.BERT)
  shape = jax.export.symbolic_shape(f'batch, {size}' if text else f'batch, {size}, {size}, 3')
  images = jax.ShapeDtypeStruct(shape, jnp.uint16 if text else jnp.uint8)
  return jax.export.export(apply, platforms=PLATFORMS)(images)


def _readme(config, encoder, about) -> str:
  """How to load the files, with this run's names and numbers."""
  size, square, platforms = config.data.image_size, features.shown(config), ' or '.join(PLATFORMS)
  image = f'the centre square of an image, {square} px a side'
  crop = '' if square == size else f', of which it saw the centre {size} px'
  return f"""# {config.model.name}, step {about['step']}

The encoder of one run of ssl_jax {about['ssl_jax']} on {config.data.name}: {size} px to {about['features']} features.
Evaluations showed it {image}{crop}.

## torch

`encoder.safetensors` holds float32 weights under torch's names and in torch's layouts.

```python
import torch
from safetensors.torch import load_file
{_torch_network(config, encoder)}
encoder.load_state_dict(load_file('encoder.safetensors'))
encoder.eval()

mean, std = torch.tensor({about['mean']}).view(3, 1, 1), torch.tensor({about['std']}).view(3, 1, 1)
features = encoder((images / 255 - mean) / std)  # uint8 [n, 3, {size}, {size}] -> [n, {about['features']}]
```

`projector.safetensors` holds the head that stood on it in training (`{config.projector.name}`), as `projector.*`.

## jax

`encoder.jax` is the whole encoder, with weights and normalisation, computing in {config.dtype} on {platforms}.
It needs `pip install jax flatbuffers` and nothing of ssl_jax. Later versions of jax promise to read it for half a year;
the weights above last longer.

```python
import jax.export

with open('encoder.jax', 'rb') as file:
  encoder = jax.export.deserialize(bytearray(file.read()))
features = encoder.call(images)  # uint8 [n, {square}, {square}, 3] -> float32 [n, {about['features']}]
```

## ssl_jax

`--config.init=encoder.safetensors` starts a run from these weights, or judges them (`--mode=evaluate --config=...`).
"""


def _readme_of_text(config, encoder, about) -> str:
  """As `_readme`, of an encoder of sentences."""
  tokens, platforms = about['tokens'], ' or '.join(PLATFORMS)
  sizes = f'hidden_size={encoder.width}, num_hidden_layers={encoder.depth}, num_attention_heads={encoder.heads}'
  more = f'intermediate_size={4 * encoder.width}, max_position_embeddings={encoder.positions}'
  pooled = {
    'cls': 'hidden[:, 0]',
    'mean': "(hidden * inputs['attention_mask'][..., None]).sum(1) / inputs['attention_mask'].sum(1, keepdim=True)",
  }[encoder.pooling]
  return f"""# {config.model.name}, step {about['step']}

The encoder of one run of ssl_jax {about['ssl_jax']} on {config.data.name}: {tokens} tokens to {encoder.width} features.
`vocab.txt` is its vocabulary, in lower case.

## torch

`encoder.safetensors` holds float32 weights under the names of transformers.

```python
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizerFast

sizes = dict({sizes}, {more})
encoder = BertModel(BertConfig(vocab_size={encoder.vocabulary}, **sizes), add_pooling_layer=False)
encoder.load_state_dict(load_file('encoder.safetensors'))
encoder.eval()

tokenizer = BertTokenizerFast('vocab.txt')
inputs = tokenizer(sentences, padding=True, truncation=True, max_length={tokens}, return_tensors='pt')
hidden = encoder(**inputs).last_hidden_state
features = {pooled}  # [n, {about['features']}]
```

`projector.safetensors` holds the head that stood on it in training (`{config.projector.name}`), as `projector.*`.

## jax

`encoder.jax` is the whole encoder with its weights, computing in {config.dtype} on {platforms}.
It needs `pip install jax flatbuffers` and nothing of ssl_jax. Later versions of jax promise to read it for half a year;
the weights above last longer.

```python
import jax.export

with open('encoder.jax', 'rb') as file:
  encoder = jax.export.deserialize(bytearray(file.read()))
features = encoder.call(tokens)  # uint16 [n, {tokens}] of vocab.txt, then 0 -> float32 [n, {encoder.width}]
```

## ssl_jax

`--config.init=encoder.safetensors --config.data.vocabulary=vocab.txt` starts a run from these weights, or judges them
(`--mode=evaluate --config=...`).
"""


def _torch_network(config, encoder) -> str:
  """Python that makes the network in torch, as `encoder`."""
  if isinstance(encoder, ViT):
    sizes = f'img_size={config.data.image_size}, patch_size={encoder.patch}, embed_dim={encoder.width}'
    layers = f'depth={encoder.depth}, num_heads={encoder.heads}'
    return f'import timm\n\nencoder = timm.models.VisionTransformer({sizes}, {layers}, num_classes=0)'
  if not isinstance(encoder, ResNet):
    return '\nencoder = ...  # your torch.nn.Module with these layers: load_file(...) names them with their shapes'
  name = config.model.name.removesuffix('_cifar')
  if name == 'resnet_tiny' or {'width', 'stage_sizes'} & set(config.model):
    sizes = f"of torchvision's names, with stages of {encoder.stage_sizes} blocks from {encoder.width} channels"
    return f'\nencoder = ...  # your torch.nn.Module {sizes}'
  lines = ['import torchvision', '', f'encoder = torchvision.models.{name}()']
  if encoder.stem == 'cifar':
    stride = encoder.stem_stride or 1
    lines.append(f'encoder.conv1 = torch.nn.Conv2d(3, 64, 3, {stride}, 1, bias=False)  # the stem of small images')
    lines.append('encoder.maxpool = torch.nn.Identity()')
  elif encoder.stem_stride:
    lines.append(f'encoder.conv1 = torch.nn.Conv2d(3, 64, 7, {encoder.stem_stride}, 3, bias=False)')
  return '\n'.join([*lines, 'encoder.fc = torch.nn.Identity()'])
