"""The text transformer of CLIP (Radford et al. 2021). It is causal, and the last token gives the features."""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from ssl_jax.arrays import to_float32
from ssl_jax.models.bert import KEY_WORDS, PAD, SentenceEncoder
from ssl_jax.models.embedding import Embed
from ssl_jax.models.transformer import LayerNorm, attend, require_sizes, require_text
from ssl_jax.registry import require, require_choice

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': functools.partial(nn.gelu, approximate=False),
  'quick_gelu': lambda x: x * nn.sigmoid(1.702 * x),  # for the weights published by OpenAI
}
_Norm = functools.partial(LayerNorm, epsilon=1e-5)


class Block(nn.Module):
  """x + attention(norm(x)), causal, then x + mlp(norm(x)).  [N, T, D] -> [N, T, D]

  `depth` is the depth of the whole transformer, which determines the scale of the initial weights.
  """

  heads: int
  depth: int
  activation: str
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    n, t, d = x.shape
    into, out, hidden = d**-0.5, d**-0.5 * (2 * self.depth) ** -0.5, (2 * d) ** -0.5
    dense = lambda features, name, std: nn.Dense(
      features, kernel_init=nn.initializers.normal(std), dtype=self.dtype, name=name
    )
    qkv = dense(3 * d, 'qkv', into)(_Norm(name='ln_1')(x)).reshape(n, t, 3, self.heads, d // self.heads)
    query, key, value = (qkv[:, :, i] for i in range(3))
    x = x + dense(d, 'proj', out)(attend(query, key, value, causal=True))
    y = ACTIVATIONS[self.activation](dense(4 * d, 'c_fc', hidden)(_Norm(name='ln_2')(x)))
    return x + dense(d, 'c_proj', out)(y)


class CLIPText(SentenceEncoder):
  """Sentences, uint32 [N, T + 2] -> features [N, width] in float32.

  A sentence consists of its tokens, padded with `PAD`, and two words that are ignored (BERT's dropout key). A token
  attends to itself and to earlier tokens. The features are those of the last token that is not padding, after the last
  layer norm. CLIP's projection is a separate head, the projector. `remat` recomputes each block in the backward pass.
  """

  width: int
  depth: int
  heads: int
  vocabulary: int = 49408
  positions: int = 77
  activation: str = 'gelu'
  remat: bool = False
  dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    require_sizes(self.width, self.depth, self.heads)
    require_choice('activation', self.activation, ACTIVATIONS)
    require_text(self.vocabulary, self.positions)
    super().__post_init__()

  @nn.compact
  def __call__(self, sentences: jax.Array, train: bool) -> jax.Array:
    del train
    chex.assert_rank(sentences, 2)
    tokens = sentences[:, : sentences.shape[1] - KEY_WORDS]
    length = tokens.shape[1]
    require('data.tokens', length, lambda x: x <= self.positions, f'at most positions = {self.positions}')
    embed = lambda number, std, name: Embed(
      number, self.width, embedding_init=nn.initializers.normal(std), dtype=self.dtype, name=name
    )
    x = embed(self.vocabulary, 0.02, 'token_embedding')(tokens)
    x = x + embed(self.positions, 0.01, 'positional_embedding')(jnp.arange(length))[None]
    block = nn.remat(Block) if self.remat else Block
    for i in range(self.depth):
      x = block(self.heads, self.depth, self.activation, self.dtype, name=f'resblocks_{i}')(x)
    x = _Norm(name='ln_final')(x)
    last = jnp.max(jnp.where(tokens != PAD, jnp.arange(length)[None], 0), axis=1)
    return to_float32(x.at[jnp.arange(x.shape[0]), last].get(unique_indices=True))
