"""Contrast of images and text in both directions: CLIP, SigLIP and CACR, or any contrastive loss and temperature."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.arrays import normalize
from ssl_jax.losses import Loss
from ssl_jax.methods.moco import check_queue, enqueue, new_queue
from ssl_jax.methods.protocol import Inputs, Method, Network, Outputs, mean, of_positives
from ssl_jax.registry import prefix


class Towers(Network):
  """The image network, with the caption network in `text`. It encodes images only; `text` is applied separately."""

  text: Network | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageText(Method):
  """Image and caption are positives; captions and images of other pairs are negatives (CLIP, Radford et al. 2021).

  The last view is the caption; the others are views of the image. With images x_v,i (V views), captions y_i, and
  ℓ(pos, neg) the loss of a query:

    L = mean over v and i of ℓ({x_v,i · y_i}, {x_v,i · y_j : j ≠ i}) / 2
      + mean over i of ℓ({y_i · x_v,i : v}, {y_i · x_v,j : v, j ≠ i}) / 2.

  With one view and `info_nce` this is CLIP, with `sigmoid` SigLIP. In the config, `method.text` is the caption encoder
  and `method.text_projector` its projector, by default a head like `projector`.

  With a queue, the captions of earlier batches are additional negatives of each image, and the images of earlier
  batches (their last view) are additional negatives of each caption. Queued embeddings are not recomputed and have no
  gradient (Wang et al. 2020).

  Attributes:
    queue: the number of pairs from earlier batches that are negatives; 0 for the current batch only.
    block: as in SimCLR.
  """

  least_views: ClassVar[int] = 1
  text: ClassVar[bool] = True

  contrast: Loss
  queue: int = 0
  block: int = 0

  def __post_init__(self):
    if self.queue:
      check_queue(self.queue, self.plan.batch_size)
    with prefix('method'):
      pairs.check_block(self.block)

  @property
  def reader(self) -> Method:
    """This method with the caption network in place of the image network; `_of_text` selects its parameters."""
    assert isinstance(self.network, Towers) and self.network.text is not None
    return dataclasses.replace(self, network=self.network.text)

  def init(self, key: jax.Array, images: jax.Array) -> tuple[Any, Any, Any]:
    params, batch_stats, extra = super().init(key, images)
    text = self.reader.network
    sentences = text.encoder.example(3)  # the parameters do not depend on the number of tokens
    outputs, variables = text.init_with_output(jax.random.fold_in(key, 1), sentences, train=False)
    widths = self.width(params, batch_stats, images), outputs['projector'].shape[1]
    if widths[0] != widths[1]:
      raise ValueError(
        f'method.text_projector gives {widths[1]} features, but projector gives {widths[0]}: set the features of one'
      )
    params = {**params, 'network': {**params['network'], 'text': variables['params']}}
    if 'batch_stats' in variables:
      batch_stats = {**batch_stats, 'text': variables['batch_stats']}
    if self.queue:
      shape = (2, self.queue, widths[0])  # images and captions
      extra = {**extra, **new_queue(jax.random.fold_in(key, 2), shape, self.plan.batch_size)}
    return params, batch_stats, extra

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    *views, sentences = inputs.views
    images, batch_stats = self.embed(params, batch_stats, views)
    (text,), text_stats = self.reader.embed(*_of_text(params, batch_stats), [sentences])
    batch_stats = {**batch_stats, 'text': text_stats} if text_stats else batch_stats
    tau, contrast = self.tau(params, inputs), self.contrast.at(params)
    make = functools.partial(pairs.with_keys, axis_name=self.axis_name, block=self.block)
    queue = enqueue(extra) if self.queue else {}
    earlier_images, earlier_text = queue.get('queue', (None, None))
    of_pairs = lambda pair: jnp.mean(contrast(pair.pos, pair.neg, tau, where=pair.where, axis_name=self.axis_name))
    to_text = [make(image, text, earlier_text) for image in images]
    to_image = make(text, jnp.stack(images, axis=1), earlier_images)
    loss = (mean([of_pairs(pair) for pair in to_text]) + of_pairs(to_image)) / 2
    metrics = of_positives(to_image.pos, contrast.temperature(tau, to_image.pos))
    metrics |= {f'loss_{name}': jnp.asarray(value) for name, value in params.get('loss', {}).items()}
    if self.queue:
      keys = [pairs.gather(normalize(jax.lax.stop_gradient(x)), self.axis_name) for x in (images[-1], text)]
      extra = {**extra, **queue, 'keys': jnp.stack(keys)}
    return loss, Outputs(batch_stats, extra, metrics)

  def text_features(self, params: Any, batch_stats: Any, sentences: jax.Array) -> dict[str, jax.Array]:
    """{'backbone': [b, D], 'projector': [b, P]} of sentences, with the running statistics of batch norm."""
    return self.reader.features(*_of_text(params, batch_stats), sentences)


def _of_text(params: Any, batch_stats: Any) -> tuple[Any, Any]:
  """The parameters and running statistics for `ImageText.reader`."""
  return {**params, 'network': params['network']['text']}, batch_stats.get('text', {})
