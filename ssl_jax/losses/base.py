"""What all contrastive losses share: shapes, types, masks, blocks, properties, and construction from a config.

A contrastive loss is a function of similarities with the decorator `@contrastive_loss`, which also adds it to
`CONTRASTIVE`, the table that configs refer to.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ssl_jax import pairs
from ssl_jax.arrays import to_float32
from ssl_jax.registry import arguments, find, prefix
from ssl_jax.stream import NotStreamableError, Stream
from ssl_jax.temperature import Temperature, for_queries

_GIVEN = ('pos', 'neg', 'temperature', 'where', 'view_pairs', 'axis_name')  # arguments that a config does not set


@dataclasses.dataclass(frozen=True)
class Properties:
  """Properties of a loss beyond its equation.

  Attributes:
    no_temperature: why it takes no temperature; '' if it takes one.
    own_temperature: the function of `pos` and of parameters of the loss that computes its temperature; None otherwise.
    cosine_only: why similarities must be cosines; '' if any similarity is valid.
    separable: whether it is a term of the positives plus a term of the negatives.
    inverse_temperature: the name of the parameter that is 1 / tau; '' if there is none.
    learned: the names of the parameters that training learns; their given values are the initial ones.
    streamed: whether it takes a `Stream`, because it uses negatives only in arithmetic and in `logsumexp`,
      `softmax_mean`, `total` and `count` of `losses.reductions`.

  >>> Properties(no_temperature='its alpha is 1 / tau', separable=True).cosine_only
  ''
  """

  no_temperature: str = ''
  own_temperature: Callable[..., jax.Array] | None = None
  cosine_only: str = ''
  separable: bool = False
  inverse_temperature: str = ''
  learned: tuple[str, ...] = ()
  streamed: bool = False


class ContrastiveLoss(Protocol):
  """A function of similarities that declares its properties.

  >>> from ssl_jax import losses
  >>> losses.simple.properties.separable
  True
  """

  __name__: str
  properties: Properties

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array: ...

  def __hash__(self) -> int: ...


CONTRASTIVE: dict[str, ContrastiveLoss] = {}  # every contrastive loss by name


def contrastive_loss(**properties: Any) -> Callable[[Callable[..., jax.Array]], ContrastiveLoss]:
  """A decorator for contrastive losses. Its arguments are the fields of their `Properties`.

  The decorated function receives float32 `pos` `[Q, K]` and `neg` `[Q, M]`, and a bool `where` `[Q, M]` even if the
  caller gives none. If the caller passes `pairs.NegativeBlocks`, a `streamed` loss receives a `Stream` as `neg`, with
  `where` None. If the loss is not `streamed`, or its similarity or temperature does not allow a `Stream`, it is called
  for one block of queries at a time. A loss that takes `axis_name`, for a mean over all queries, receives all the
  `NegativeBlocks` instead, with `where` None, and reads them through `over_negatives`.

  >>> @contrastive_loss(no_temperature='this example has none')
  ... def margin_free(pos, neg, *, where=None):
  ...   return jnp.max(neg, axis=1, where=where, initial=-1.0) - jnp.min(pos, axis=1)
  >>> print(margin_free(jnp.array([0.75]), jnp.array([[0.25, -0.5]])), CONTRASTIVE.pop('margin_free').__name__)
  [-0.5] margin_free
  """

  declared = Properties(**properties)

  def decorate(function: Callable[..., jax.Array]) -> ContrastiveLoss:
    loss: Any = _with_checks(function, declared.streamed)
    loss.properties = declared
    CONTRASTIVE[function.__name__] = loss
    return loss

  return decorate


def _with_checks(function: Callable[..., jax.Array], streamed: bool) -> Callable[..., jax.Array]:
  signature = inspect.signature(function)

  positional = ['pos', 'neg', *(['temperature'] if 'temperature' in signature.parameters else [])]

  @functools.wraps(function)
  def loss(pos, neg, *args, where=None, **kwargs):
    if len(args) > len(positional) - 2:
      named = [key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
      raise TypeError(f'{function.__name__} takes {", ".join(positional)} by position: give {", ".join(named)} by name')
    chex.assert_rank(pos, {1, 2})
    pos = to_float32(pos)
    pos = pos[:, None] if pos.ndim == 1 else pos
    if isinstance(neg, Stream):  # this loss is called by another loss
      return function(pos, neg, *args, where=None, **kwargs)
    if isinstance(neg, pairs.NegativeBlocks):
      chex.assert_equal_shape_prefix([pos, neg.queries], 1)
      if where is not None:
        raise ValueError(f'where has shape {where.shape}, but blocks of negatives have their own mask: leave it out')
      return on_blocks(pos, neg, *args, **kwargs)
    return on_arrays(pos, neg, where, *args, **kwargs)

  def on_blocks(pos, blocks, *args, **kwargs):
    if streamed and (stream := blocks.stream()) is not None:
      with contextlib.suppress(NotStreamableError):
        return jnp.where(stream.count() > 0, function(pos, stream, *args, where=None, **kwargs), 0)
    if 'axis_name' in signature.parameters:
      some = blocks.map(lambda _, where: where.any(axis=1))
      return jnp.where(some, function(pos, blocks, *args, where=None, **kwargs), 0)
    given = signature.bind(pos, blocks, *args, **kwargs).arguments
    del given['neg']
    if 'temperature' in given:
      given['temperature'] = for_queries(given['temperature'], len(blocks.queries))
    by_query = {key: value for key, value in given.items() if np.ndim(value)}  # pos, and a temperature per query
    shared = {key: value for key, value in given.items() if key not in by_query}
    return blocks.map(lambda neg, where, mine: loss(neg=neg, where=where, **mine, **shared), by_query)

  def on_arrays(pos, neg, where, *args, **kwargs):
    chex.assert_rank(neg, 2)
    chex.assert_equal_shape_prefix([pos, neg], 1)
    neg = to_float32(neg)
    if 0 in (pos.shape[1], neg.shape[1]):
      raise ValueError(
        f'pos, neg = {pos.shape}, {neg.shape} have no columns: give each query a positive and a negative'
      )
    if where is not None:
      chex.assert_equal_shape([neg, where])
    where = negatives(neg, where)
    if not isinstance(where, jax.core.Tracer) and not (some := np.asarray(where).any(axis=1)).all():
      query = some.argmin()
      raise ValueError(f'where is False for every negative of query {query}: drop the query or give it a negative')
    neg = jnp.where(where, neg, 0)
    return jnp.where(where.any(axis=1), function(pos, neg, *args, where=where, **kwargs), 0)

  return loss


def negatives(neg: jax.Array, where: jax.Array | None) -> jax.Array:
  """Which entries are negatives: those that `where` keeps, except -inf, with which `ssl_jax.pairs` marks other keys.

  >>> negatives(jnp.array([[0.5, -jnp.inf]]), None).tolist()
  [[True, False]]
  """
  kept = neg != -jnp.inf  # a NaN is kept, so that the loss is NaN, too
  return kept if where is None else kept & jnp.asarray(where, bool)


def over_negatives(
  function: Callable[..., Any], neg: jax.Array | Stream | pairs.NegativeBlocks, where: jax.Array | None
) -> Any:
  """Applies function(neg [Q, M], where [Q, M]) -> [Q, ...], block by block if `neg` comes in blocks.

  >>> over_negatives(lambda neg, where: jnp.sum(where, axis=1), jnp.zeros((1, 3)), jnp.ones((1, 3), bool)).tolist()
  [3]
  """
  return neg.map(function) if isinstance(neg, pairs.NegativeBlocks) else function(neg, where)


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
  """A contrastive loss with its parameters: `loss(pos, neg, temperature, where=..., axis_name=...) -> [Q]`.

  Attributes:
    function: an entry of `CONTRASTIVE`.
    parameters: its arguments by name, except the similarities, the mask and the temperature.

  >>> from ssl_jax import losses
  >>> print(Loss(losses.simple, dict(weight=0.5))(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-0.95]
  """

  function: ContrastiveLoss
  parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return self.function.__name__

  @property
  def properties(self) -> Properties:
    return self.function.properties

  @property
  def takes_temperature(self) -> bool:
    return not self.properties.no_temperature

  def parameter(self, name: str) -> Any:
    """The value of a parameter, or its default if it is not set; None if there is neither.

    >>> from ssl_jax import losses
    >>> loss = Loss(losses.cacr, dict(t_neg=0.9))
    >>> loss.parameter('t_neg'), loss.parameter('t_pos'), loss.parameter('alpha')
    (0.9, 1.0, None)
    """
    known = {key: p.default for key, p in arguments(self.function).items() if p.default is not p.empty}
    return {**known, **self.parameters}.get(name)

  def init(self) -> dict[str, jax.Array]:
    """The initial values of the learned parameters; {} for most losses.

    >>> from ssl_jax import losses
    >>> print(Loss(losses.sigmoid).init()['bias'])
    -10.0
    """
    return {name: jnp.asarray(self.parameter(name), jnp.float32) for name in self.properties.learned}

  def at(self, params: Mapping[str, Any]) -> 'Loss':
    """The loss with the learned parameters of `params['loss']`; the same loss if there are none.

    >>> from ssl_jax import losses
    >>> Loss(losses.sigmoid).at({'loss': {'bias': -5.0}}).parameter('bias')
    -5.0
    """
    learned = params.get('loss', {})
    return dataclasses.replace(self, parameters={**self.parameters, **learned}) if learned else self

  def temperature(self, given: Temperature | None, pos: jax.Array) -> Temperature | None:
    """The temperature that the loss uses: the given one, or its own; None if it has none.

    >>> from ssl_jax import losses
    >>> print(Loss(losses.macl, dict(tau0=0.5)).temperature(None, jnp.array([[0.75]])))
    0.6875
    """
    own = self.properties.own_temperature
    if own is None:
      return given
    return own(pos, **{name: self.parameter(name) for name in arguments(own) if name not in _GIVEN})

  def check_temperature(self, temperature: Temperature | None) -> None:
    """Raises a ValueError if a temperature is missing, or is given to a loss that takes none."""
    if self.takes_temperature and temperature is None:
      raise ValueError(f'temperature = None, but the loss {self.name!r} needs one: give a number, such as 0.2')
    if not self.takes_temperature and temperature is not None:
      raise ValueError(f'the loss {self.name!r} takes no temperature: {self.properties.no_temperature}')

  def __call__(
    self,
    pos: jax.Array,
    neg: jax.Array | pairs.NegativeBlocks,
    temperature: Temperature | None = None,
    *,
    where: jax.Array | None = None,
    view_pairs: int = 1,
    axis_name: str | None = None,
  ) -> jax.Array:
    self.check_temperature(temperature)
    given = {'temperature': temperature, 'view_pairs': view_pairs, 'axis_name': axis_name}
    given = {key: value for key, value in given.items() if key in arguments(self.function)}
    return self.function(pos, neg, where=where, **self.parameters, **given)


def from_config(spec: Mapping[str, Any]) -> Loss:
  """The contrastive loss that a config section names, with every argument checked.

  >>> print(from_config(dict(name='simple', weight=0.5))(jnp.array([0.9]), jnp.array([[0.1, -0.2]])))
  [-0.95]
  """
  found = find('loss', spec, CONTRASTIVE, given=_GIVEN)
  loss = Loss(CONTRASTIVE[found.name], found.parameters)
  with prefix('loss'):  # tracing is enough, because the loss checks its own arguments
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jax.eval_shape(lambda pos, neg: loss(pos, neg, temperature=1.0 if loss.takes_temperature else None), one, one)
  return loss
