"""Exports the encoder of a run as a model folder for the Hugging Face Hub: weights, a jax program, a model card."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from ml_collections import ConfigDict

import ssl_jax
from ssl_jax import methods, models
from ssl_jax.arrays import normalize
from ssl_jax.config import restore
from ssl_jax.data.modality import modality_of
from ssl_jax.data.views import augment_settings
from ssl_jax.evals import features
from ssl_jax.methods.image_text import Towers
from ssl_jax.models import bert, torch_weights
from ssl_jax.models.encoder import Encoder
from ssl_jax.models.resnet import Bottleneck, ResNet
from ssl_jax.reporting import model_card, torch_code
from ssl_jax.workdir import files
from ssl_jax.workdir.checkpoints import Checkpoints

PLATFORMS = ('cpu', 'cuda')  # for which the jax program is lowered


_DETECTRON2 = """
## detectron2

`detectron2.safetensors` holds the same weights under the names of detectron2's R50-C4. Its checkpointer reads `.pth`:

```
python -c "
import torch; from safetensors.torch import load_file
torch.save({{'model': load_file('detectron2.safetensors')}}, 'detectron2.pth')"
```

Images are RGB, and the stride of a block is on its 3×3 convolution. With the configs of MoCo's `detection` folder
(https://github.com/facebookresearch/moco), which also set the other hyper-parameters of He et al. 2020:

```
python train_net.py --config-file configs/pascal_voc_R_50_C4_24k_moco.yaml --num-gpus 8 \\
  MODEL.WEIGHTS detectron2.pth {flags}
python train_net.py --config-file configs/coco_R_50_C4_2x_moco.yaml --num-gpus 8 \\
  MODEL.WEIGHTS detectron2.pth {flags} {schedule}
```

The first is detection on PASCAL VOC 07+12, the second detection and segmentation on COCO with the 1x schedule.
"""
ONE_X = "SOLVER.MAX_ITER 90000 SOLVER.STEPS '(60000, 80000)'"  # MoCo's config file has the 2x schedule


class Notes(NamedTuple):
  """Texts and settings of an export that depend on the modality."""

  shape: str  # of one input of the program
  dtype: DTypeLike
  about: dict[str, str]  # metadata of the safetensors files
  inputs: str  # description of the inputs
  preprocessing: str  # how evaluations prepared the inputs, in a sentence
  names: str  # the library whose names and layouts the weights have
  torch: str  # code that computes `features` with the torch encoder
  call: str  # code that computes `features` with the jax program
  flags: str = ''  # additional flags for a run that starts from the weights
  files: tuple[str, ...] = ()  # of the workdir that are exported too, such as the vocabulary


def _image_notes(config: ConfigDict, encoder: Encoder) -> Notes:
  del encoder
  size, square = config.data.image_size, features.image_size(config)
  settings, _ = augment_settings(config)
  about = {'image_size': str(size), 'mean': json.dumps(settings['mean']), 'std': json.dumps(settings['std'])}
  crop = '' if square == size else f' and cropped to the central {size} pixels'
  return Notes(
    shape=f'{square}, {square}, 3',
    dtype=jnp.uint8,
    about=about,
    inputs=f'images of {size} px',
    preprocessing=f'In evaluations, the central square of each image was resized to {square} pixels{crop}.',
    names='torchvision for a ResNet, timm for a ViT, and the code below for others',
    torch=(
      f'mean, std = (torch.tensor(x).view(3, 1, 1) for x in ({about["mean"]}, {about["std"]}))\n'
      f'features = encoder((images / 255 - mean) / std)  # images: uint8 [n, 3, {size}, {size}]'
    ),
    call=f'features = encoder.call(images)  # uint8 [n, {square}, {square}, 3]; normalization is included',
  )


def _sentence_notes(config: ConfigDict, encoder: models.BERT | models.CLIPText) -> Notes:
  tokens, rules = config.data.tokens, config.data.vocabulary.endswith('.json')
  file = 'tokenizer.json' if rules else 'vocab.txt'
  load = "from transformers import BertTokenizerFast\n\ntokenizer = BertTokenizerFast('vocab.txt')\n"
  if rules:
    load = (
      'from transformers import PreTrainedTokenizerFast\n\ntokenizer = PreTrainedTokenizerFast(tokenizer_file='
      "'tokenizer.json')\ntokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)\n"
    )
  if isinstance(encoder, models.BERT):
    names, hidden = 'transformers', 'hidden = encoder(**inputs).last_hidden_state\n'
    pooled = {
      'cls': 'features = hidden[:, 0]',
      'mean': "mask = inputs['attention_mask'][..., None]\nfeatures = (hidden * mask).sum(1) / mask.sum(1)",
    }
    compute = hidden + pooled[encoder.pooling]
  else:
    names, compute = 'the code below', "features = encoder(inputs['input_ids'])"
  return Notes(
    shape=str(tokens),
    dtype=jnp.uint16,
    about={'tokens': str(tokens)},
    inputs=f'sentences of {tokens} tokens',
    preprocessing='`tokenizer.json` has its vocabulary.' if rules else '`vocab.txt` is its vocabulary, in lower case.',
    names=names,
    torch=(
      f"{load}inputs = tokenizer(sentences, padding=True, truncation=True, max_length={tokens}, return_tensors='pt')\n"
      + compute
    ),
    call=f'features = encoder.call(tokens)  # uint16 [n, {tokens}], entries of {file}, padded with 0',
    flags=f' --config.data.vocabulary={file}',
    files=(file,),
  )


NOTES: dict[str, Callable[[ConfigDict, Any], Notes]] = {
  'images': _image_notes,
  'sentences': _sentence_notes,
  'pairs': _image_notes,
}


def export(config: ConfigDict, workdir: str) -> pathlib.Path:
  """Exports the encoder of a workdir's newest checkpoint, with the weights that evaluations use, to WORKDIR/export.

  Needs the config and the checkpoint, but not the training data. Returns the folder.
  """
  saved = files.read_config(workdir)  # raises for a wrong workdir instead of creating it
  workdir = files.check(workdir, config.to_dict())
  checkpoints = Checkpoints(workdir)
  state = checkpoints.newest()
  checkpoints.close()
  params, batch_stats = state.evaluated
  parts = {
    name: {'params': params['network'].get(name, {}), 'batch_stats': batch_stats.get(name, {})}
    for name in ('encoder', 'projector')
  }
  encoder = models.create(dtype=jnp.dtype(config.dtype), **config.model)
  modality = modality_of(config)
  size, notes = modality.input_size(config), NOTES[modality.name](config, encoder)
  eval_view = modality.views(config, on_device=True).eval_view
  program = to_program(encoder, parts['encoder'], eval_view, notes.shape, notes.dtype)
  about = {
    'model': json.dumps(config.model.to_dict()),
    'step': str(int(state.step)),
    'features': str(program.out_avals[0].shape[1]),
    'ssl_jax': ssl_jax.__version__,
    **notes.about,
  }
  tensors = torch_weights.to_torch(parts['encoder']) | encoder.torch_constants(size)
  head = {f'projector.{name}': tensor for name, tensor in torch_weights.to_torch(parts['projector']).items()}
  head_about = about | {'projector': json.dumps(config.projector.to_dict())}
  recorded = restore(saved, config)  # the results are those of the run, whatever flags this command has
  detection, card = is_r50_c4(encoder), model_card.read(recorded, workdir, int(state.step))
  written = {
    'model.safetensors': _safetensors(tensors, about),
    'config.json': model_card.config_json(recorded, about).encode(),
    'encoder.jax': bytes(program.serialize()),
    'projector.safetensors': _safetensors(head, head_about),
    'README.md': _readme(config, torch_code.source(encoder, size), about, notes, detection, card).encode(),
    **{name: (workdir / name).read_bytes() for name in notes.files},
  }
  if detection:
    written['detectron2.safetensors'] = _safetensors(torch_weights.to_detectron2(tensors), about)
  if modality.name == 'pairs':
    written |= _text_files(config, params, batch_stats, workdir, eval_view, notes)
  folder = files.writable(workdir / 'export')
  files.write_together({folder / name: data for name, data in written.items()})
  print(f'{config.model.name} at step {about["step"]}, {notes.inputs} to {about["features"]} features: {folder}')
  print(f'  {", ".join(written)}; README.md has the code that loads them')
  return folder


def _text_files(
  config: ConfigDict, params: Any, batch_stats: Any, workdir: pathlib.Path, eval_view: Callable, notes: Notes
) -> dict[str, bytes]:
  """The additional files of an image-text run: text encoder, text projector, vocabulary, and embedding programs.

  image_embedding.jax and text_embedding.jax return unit vectors, whose dot products are the similarities of the loss.
  """
  network = methods.parts(config).network
  assert isinstance(network, Towers) and network.text is not None
  variables = {'params': params['network'], 'batch_stats': batch_stats}
  of_text = {'params': params['network']['text'], 'batch_stats': batch_stats.get('text', {})}
  part = lambda name: {key: tree.get(name, {}) for key, tree in of_text.items()}
  head = {f'projector.{name}': tensor for name, tensor in torch_weights.to_torch(part('projector')).items()}
  tokens = str(config.data.tokens)
  programs = {
    'image_embedding.jax': to_program(_Embedding(network), variables, eval_view, notes.shape, notes.dtype),
    'text_embedding.jax': to_program(_Embedding(network.text), of_text, bert.without_dropout, tokens, jnp.uint16),
  }
  words = [workdir / name for name in ('vocab.txt', 'tokenizer.json') if (workdir / name).is_file()]
  return {
    'text_encoder.safetensors': _safetensors(torch_weights.to_torch(part('encoder')), {'tokens': tokens}),
    'text_projector.safetensors': _safetensors(head),
    **{name: bytes(program.serialize()) for name, program in programs.items()},
    **{file.name: file.read_bytes() for file in words},
  }


def _safetensors(tensors: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None) -> bytes:
  """A safetensors file with sorted metadata. The library would draw their order at random in each export."""
  import safetensors.numpy

  content = safetensors.numpy.save(dict(tensors))
  size = 8 + int.from_bytes(content[:8], 'little')
  header = json.loads(content[8:size])
  if about:
    header = {'__metadata__': dict(sorted(about.items())), **header}
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)  # the tensors are aligned
  return len(text).to_bytes(8, 'little') + text + content[size:]


class _Embedding(NamedTuple):
  """Adapts a network to `to_program`: inputs -> unit projections."""

  network: methods.Network

  def apply(self, variables: Mapping, inputs: jax.Array, train: bool) -> jax.Array:
    outputs: Any = self.network.apply(variables, inputs, train=train)
    return normalize(outputs['projector'])


def to_program(
  encoder: Encoder | _Embedding, variables: Mapping, eval_view: Callable, shape: str, dtype: DTypeLike
) -> jax.export.Exported:
  """The program: inputs [batch, ...] -> float32 features [batch, D], for any batch size. It contains the weights.

  `eval_view` maps one input of `shape` and `dtype` to an encoder input: the crop and the normalization of evaluations.
  """
  apply = jax.jit(lambda inputs: encoder.apply(variables, jax.vmap(eval_view)(inputs), train=False))
  inputs = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f'batch, {shape}'), dtype)
  return jax.export.export(apply, platforms=PLATFORMS)(inputs)


_TEXT = """## Image and text

`image_embedding.jax` and `text_embedding.jax` are the two encoders with their projectors, as serialized functions that
return unit vectors. The first takes images as above, the second uint16 tokens of the vocabulary in this folder, padded
with 0. The dot product of an image and a text is their cosine similarity.
`text_encoder.safetensors` and `text_projector.safetensors` hold the weights of the text encoder.

"""


def _readme(
  config: ConfigDict,
  torch_source: str,
  about: Mapping[str, str],
  notes: Notes,
  detection: bool,
  card: model_card.Card,
) -> str:
  """The model card: results, and the code that loads the files of this export."""
  return f"""{card.head}# {config.model.name}, step {about['step']}

The encoder of a run of ssl_jax {about['ssl_jax']} on {config.data.name}.
It maps {notes.inputs} to {about['features']} features. {notes.preprocessing}

{model_card.results_section(card)}## torch

`model.safetensors` holds the weights in float32. Their names and layouts are those of {notes.names}.

```python
{torch_source}

from safetensors.torch import load_file

encoder.load_state_dict(load_file('model.safetensors'))
encoder.eval()

{notes.torch}
```

`projector.safetensors` holds the projector (`{config.projector.name}`) used in training, as `projector.*`.

## jax

`encoder.jax` is the encoder with its weights as a serialized function.
It computes in {config.dtype} on {' and '.join(PLATFORMS)}, and needs `pip install jax flatbuffers`, but not ssl_jax.
Newer versions of jax can read it for at least six months; the weights above last longer.

```python
import jax.export

with open('encoder.jax', 'rb') as file:
  encoder = jax.export.deserialize(bytearray(file.read()))
{notes.call}
```

{_TEXT if modality_of(config).name == 'pairs' else ''}## ssl_jax

`--config.init=model.safetensors{notes.flags}` starts a run from these weights.
With `--mode=evaluate --config=...`, it evaluates them.
""" + (_detectron2(about) if detection else '')


def is_r50_c4(encoder: Encoder) -> bool:
  """Whether detectron2 has this encoder: a ResNet with four stages of bottleneck blocks and the ImageNet stem."""
  return (
    isinstance(encoder, ResNet)
    and encoder.block is Bottleneck
    and encoder.stem == 'imagenet'
    and encoder.stem_stride in (None, 2)
    and tuple(encoder.stage_sizes) == (3, 4, 6, 3)
    and encoder.width == 64
  )


def _detectron2(about: Mapping[str, str]) -> str:
  """The commands for detectron2, with the mean and the standard deviation of the pixels."""
  mean, std = ([round(255 * x, 3) for x in json.loads(about[name])] for name in ('mean', 'std'))
  flags = f"MODEL.PIXEL_MEAN '{mean}' MODEL.PIXEL_STD '{std}'"
  return _DETECTRON2.format(flags=flags, schedule=ONE_X)
