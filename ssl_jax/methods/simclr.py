"""Contrast within a batch, with any contrastive loss and any temperature: SimCLR, CMC and CACR."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ssl_jax import pairs
from ssl_jax.losses import CONTRASTIVE, Loss
from ssl_jax.methods.protocol import Inputs, Method, Outputs, of_positives
from ssl_jax.registry import prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimCLR(Method):
  """The other views of an image are its positives, the views of all other images its negatives (Chen et al. 2020).

  Attributes:
    by_view_pair: take the negatives from one pair of views at a time, as the CACR authors' code does. The loss must be
      separable into a term of the positives and a term of the negatives. If it contains the logarithm of a mean over
      all queries (`align_uniform`, and `cacr` with the RBF cost), the logarithm is computed per pair, then averaged.
    block: if above 0, the number of queries per device that are compared with all keys at a time. This saves memory and
      gives the same results.
    ring: with `block` on several devices, pass keys around a ring instead of gathering them; same results. Losses that
      do not only sum over negatives still gather them.
    similarity: 'cosine'; or, on unnormalized embeddings, 'dot' or 'euclidean', the negative distance (Lee 2025,
      Table 1).
    views_apart: encode one view after the other, each as a separate batch for batch norm, as many implementations do.
  """

  contrast: Loss
  by_view_pair: bool = False
  block: int = 0
  ring: bool = False
  similarity: str = 'cosine'
  views_apart: bool = False

  def __post_init__(self):
    with prefix('method'):
      pairs.check_block(self.block)
      pairs.check_similarity(self.similarity)
      pairs.check_ring(self.ring, self.block)
    properties, loss = self.contrast.properties, self.contrast.name
    if self.similarity != 'cosine':
      of_cosine = 'the temperature is a function of the cosine' if self.temperature.of_similarity else ''
      if reason := properties.cosine_only or of_cosine:
        raise ValueError(f"method.similarity = {self.similarity!r} must be 'cosine' for the loss {loss!r}: {reason}")
    if self.by_view_pair and not properties.separable:
      known = ', '.join(name for name, function in CONTRASTIVE.items() if function.properties.separable)
      raise ValueError(
        f'method.by_view_pair = True needs a loss that is a term of the positives plus a term of the negatives, and '
        f'{loss!r} is not: give one of {known}, or by_view_pair=False'
      )
    if self.block and self.by_view_pair:
      raise ValueError(
        f'method.block = {self.block} cannot be combined with by_view_pair=True: set block=0 or by_view_pair=False'
      )

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    in_batch = functools.partial(pairs.in_batch, block=self.block, ring=self.ring)
    make = functools.partial(pairs.by_view_pair if self.by_view_pair else in_batch, similarity=self.similarity)
    view_pairs = math.comb(len(inputs.views), 2) if self.by_view_pair else 1
    return _contrast(self, make, params, batch_stats, extra, inputs, view_pairs=view_pairs, apart=self.views_apart)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CMC(Method):
  """Each ordered pair of views is contrasted separately, with one positive and the negatives of the second view.

  With augmentations as views this is contrastive multiview coding (Tian et al. 2019), a baseline of CACR.
  """

  contrast: Loss

  def loss(self, params: Any, batch_stats: Any, extra: Any, inputs: Inputs) -> tuple[jax.Array, Outputs]:
    view_pairs = math.perm(len(inputs.views), 2)
    return _contrast(self, pairs.across_views, params, batch_stats, extra, inputs, view_pairs=view_pairs)


def _contrast(
  method: SimCLR | CMC, make, params, batch_stats, extra, inputs: Inputs, *, view_pairs: int, apart: bool = False
):
  views, batch_stats = method.embed(params, batch_stats, inputs.views, apart)
  pos, neg, where = make(*views, axis_name=method.axis_name)
  tau = method.tau(params, inputs)
  contrast = method.contrast.at(params)
  values = contrast(pos, neg, tau, where=where, view_pairs=view_pairs, axis_name=method.axis_name)
  return jnp.mean(values), Outputs(batch_stats, extra, of_positives(pos, method.contrast.temperature(tau, pos)))
