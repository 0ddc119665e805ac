"""Contrast among the views of a batch, with any contrastive loss and any temperature: SimCLR, CMC and CACR."""

import dataclasses
import functools

import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.methods.protocol import Inputs, Method, Outputs, mean_temperature
from ssl_jax.registry import prefix

# A term of the positives plus a term of the negatives.
SEPARABLE = ('cacr', 'balanced', 'simple', 'hard_simple', 'decoupled', 'decoupled_weighted', 'align_uniform')
# Three take 2 - 2s for the squared distance, one bounds its negatives by e^(-1/tau), one scales tau by the similarity.
OF_COSINES = ('align_uniform', 'cacr', 'triplet', 'hard_negative', 'macl')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimCLR(Method):
  """The other views of an image are its positives, the views of all other images its negatives (Chen et al. 2020).

  `by_view_pair` takes the negatives from one pair of views at a time, as the CACR authors' code does, for a loss that
  is a term of the positives plus a term of the negatives. `block`, above 0, is how many queries of a device are
  compared with all keys at a time: the same numbers in less memory. `similarity` is one of `ssl_jax.pairs`: 'cosine',
  or of embeddings that are not normalised 'dot' or 'euclidean', the negative distance (supervised Table 1).
  `views_apart` encodes one view after the other, as the loops of many codes do: each is then a batch of its own for
  batch norm.
  """

  by_view_pair: bool = False
  block: int = 0
  similarity: str = 'cosine'
  views_apart: bool = False

  def __post_init__(self):
    with prefix('method'):
      pairs.check_block(self.block)
      pairs.check_similarity(self.similarity)
    if self.similarity != 'cosine' and self.contrast.name in OF_COSINES:
      reason = f'the loss {self.contrast.name!r} is one of cosines, from -1 to 1'
      raise ValueError(f"method.similarity = {self.similarity!r}, but {reason}: give 'cosine', or another loss")
    if self.similarity != 'cosine' and callable(self.temperature.at(self.temperature.init(), 0)):
      reason = 'the temperature is a function of cosines, from -1 to 1'
      raise ValueError(f"method.similarity = {self.similarity!r}, but {reason}: give 'cosine', or a constant one")
    if self.by_view_pair and self.contrast.name not in SEPARABLE:
      reason = f'the loss {self.contrast.name!r} is no term of positives plus one of negatives'
      raise ValueError(f'method.by_view_pair = True, but {reason}: give False, or one of {", ".join(SEPARABLE)}')
    if self.block and self.by_view_pair:
      raise ValueError(f'method.block = {self.block} does not go with by_view_pair=True: give 0, or by_view_pair=False')

  def loss(self, params, batch_stats, extra, inputs: Inputs):
    make = pairs.by_view_pair if self.by_view_pair else functools.partial(pairs.in_batch, block=self.block)
    make = functools.partial(make, similarity=self.similarity)
    return _contrast(self, make, params, batch_stats, extra, inputs, apart=self.views_apart)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CMC(Method):
  """Each view is contrasted with each other one on its own: one positive, and the negatives of that view alone.

  With views that are augmentations this is contrastive multiview coding (Tian et al. 2019) as cacr compares with it.
  """

  def loss(self, params, batch_stats, extra, inputs: Inputs):
    return _contrast(self, pairs.across_views, params, batch_stats, extra, inputs)


def _contrast(method: Method, make, params, batch_stats, extra, inputs: Inputs, apart: bool = False):
  views, batch_stats = method.embed(params, batch_stats, inputs.views, apart)
  pos, neg, where = make(*views, axis_name=method.axis_name)
  tau = method.tau(params, inputs)
  loss = jnp.mean(method.contrast(pos, neg, where, tau, axis_name=method.axis_name))
  return loss, Outputs(batch_stats, extra, {'positive': jnp.mean(pos), **mean_temperature(tau, pos)})
