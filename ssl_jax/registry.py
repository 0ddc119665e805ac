"""Builds what a config section names, from its `name` and parameters. Every error message is one line.

A table maps names to functions, classes or partials of them. `build` finds the entry, checks that it takes the given
parameters, and calls it; `find` does the same without the call. The entry itself checks the values of its parameters
with `require`, so that calls without a config are checked, too.
"""

import contextlib
import decimal
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

LISTED = 50  # maximum number of names in an error message
SYNONYMS = {'nt_xent': 'info_nce', 'ntxent': 'info_nce', 'lr': 'learning_rate', 'wd': 'weight_decay'}
LONGEST = 300  # maximum length of a value in an error message

# The smallest and the largest normal float32 number. Devices round smaller (subnormal) numbers to 0.
FLOAT32 = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))


class Found(NamedTuple):
  """A table entry, and the parameters that a config section gives it.

  >>> Found('round', round, {'ndigits': 1}).entry(0.26, ndigits=1)
  0.3
  """

  name: str
  entry: Callable[..., Any]
  parameters: dict[str, Any]


def find(section: str, spec: Mapping[str, Any], table: Mapping[str, Callable], given: Collection[str] = ()) -> Found:
  """The entry of `table` that `spec` names, and its parameters, checked against the entry's signature.

  Args:
    section: the path of the spec in the config, for error messages.
    spec: a mapping with `name` and the parameters of the named entry.
    table: functions, classes or partials by name; the keywords of a partial are defaults.
    given: arguments that the caller provides, which the spec must not set.

  >>> find('precision', dict(name='round', ndigits=2), {'round': round}, given=['number']).parameters
  {'ndigits': 2}
  """
  if not is_mapping(spec):
    raise ValueError(f'{section} = {show(spec)} must be a mapping, such as dict(name={next(iter(table))!r})')
  parameters = plain(spec)
  name = parameters.pop('name', None)
  if name is None:
    raise ValueError(f'{section}.name is missing: give one of {", ".join(table)}')
  if not isinstance(name, str) or name not in table:
    kind = section.rpartition('.')[2]
    raise ValueError(f'{section}.name = {show(name)} is not a known {kind}: {nearest(name, table)}')
  known = {key: p for key, p in arguments(table[name]).items() if key not in given}
  for key, value in parameters.items():
    if key not in known:
      raise ValueError(f'{section}.{key} = {show(value)} is not a parameter of {name!r}: {nearest(key, known)}')
    _require_type(f'{section}.{key}', value, known[key])
    if isinstance(value, int) and abs(value) > 2**24 and known[key].annotation is float:
      parameters[key] = float(value)  # jax would convert the int, or 1 + the int, to int32
  needed = [key for key, parameter in known.items() if parameter.default is parameter.empty]
  if missing := [key for key in needed if key not in parameters]:
    raise ValueError(f'{section}.{missing[0]} is missing: {name!r} needs {", ".join(needed)}')
  return Found(name, table[name], parameters)


def _require_type(name: str, value: Any, parameter: inspect.Parameter) -> None:
  """Raises a ValueError for a value of the wrong type, if the parameter is annotated as a bool, number or string.

  The entry itself checks everything else: ranges of numbers, schedules in place of a float, tuples.
  """
  annotation = parameter.annotation
  kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
  if value is None and type(None) in kinds:
    return
  if bool in kinds:
    require_bool(name, value)
  elif float in kinds:
    if isinstance(value, bool) or (is_number(value) and -math.inf < value < math.inf):
      require(name, value, in_float32, f'a finite number in the range of float32{_or_none(kinds)}')
  elif int in kinds and (is_number(value) or isinstance(value, bool)):
    require(name, value, is_whole, f'a whole number{_or_none(kinds)}')
  elif str in kinds:
    require(name, value, lambda x: isinstance(x, str), f'a string{_or_none(kinds)}')


def _or_none(kinds: Collection[Any]) -> str:
  return ', or None' if type(None) in kinds else ''


def build(section: str, spec: Mapping[str, Any], table: Mapping[str, Callable], **given: Any) -> Any:
  """Calls the entry of `table` that `spec` names with its parameters, and with those in `given` that it takes.

  >>> build('number', dict(name='complex', imag=2.0), {'complex': complex}, real=1.0)
  (1+2j)
  """
  found = find(section, spec, table, given)
  taken = arguments(found.entry)
  with prefix(section):
    return found.entry(**found.parameters, **{key: value for key, value in given.items() if key in taken})


@functools.cache
def arguments(entry: Callable) -> dict[str, inspect.Parameter]:
  """The arguments of a function, a class or a partial of either, without those that flax adds to a module.

  >>> list(arguments(functools.partial(round, ndigits=1)))
  ['number', 'ndigits']
  """
  fields = getattr(getattr(entry, 'func', entry), '__dataclass_fields__', {})
  of_flax = {'parent', 'name'} if 'parent' in fields else set()
  return {key: p for key, p in inspect.signature(entry).parameters.items() if key not in of_flax}


def nearest(name: Any, known: Collection[str]) -> str:
  """A hint that fixes a wrong name: "did you mean 'cosine'?", or a list of the known names.

  >>> nearest('cosin', ['constant', 'cosine'])
  "did you mean 'cosine'?"
  """
  known = [entry for entry in known if entry]
  head, dot, last = str(name).rpartition('.')
  if (same := f'{head}{dot}{SYNONYMS.get(last, last)}') in known:
    return f'did you mean {same!r}?'
  if close := difflib.get_close_matches(str(name), known, n=1):
    return f'did you mean {close[0]!r}?'
  shown = known if len(known) <= LISTED else [*known[:LISTED], '...']
  return f'give one of {", ".join(shown)}' if shown else 'leave it out'


def require(name: str, value: Any, holds: Callable[[Any], Any], must_be: str) -> None:
  """Raises a ValueError, '{name} = {value} must be {must_be}', unless `holds(value)`.

  A traced value is not checked.

  >>> require('fraction', 0.5, lambda x: 0 < x <= 1, 'in (0, 1]')
  """
  if isinstance(value, jax.core.Tracer):
    return
  try:
    valid = bool(holds(concrete(value)))
  except (TypeError, ValueError, IndexError, OverflowError):  # the value has the wrong type
    valid = False
  if not valid:
    raise ValueError(f'{name} = {show(value)} must be {must_be}')


def concrete(value: Any) -> Any:
  """Converts a jax array to numpy: inside jit, jax would trace a comparison even of a concrete array.

  >>> concrete(jax.numpy.ones(2)), concrete(0.5)
  (array([1., 1.], dtype=float32), 0.5)
  """
  return np.asarray(value) if isinstance(value, jax.Array) else value


def is_number(value: Any) -> bool:
  """Whether a value is a number or an array; True and False do not count as numbers.

  >>> is_number(1), is_number(True), is_number('1')
  (True, False, False)
  """
  return isinstance(value, int | float | np.number | np.ndarray | jax.Array) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
  """Whether a value is an integer that fits in 64 bits; True and False do not count as numbers.

  >>> is_whole(2), is_whole(2.0), is_whole(True)
  (True, False, False)
  """
  return isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63


def in_float32(value: Any) -> bool:
  """Whether a value is a number that neither overflows nor underflows in float32.

  >>> in_float32(0.0), in_float32(1e-300), in_float32(1e300), in_float32(True)
  (True, False, False, False)
  """
  low, high = FLOAT32
  return is_number(value) and bool(value == 0 or low <= abs(value) <= high)


def require_positive(**values: Any) -> None:
  """Raises a ValueError unless each value is a positive and finite number, also in float32.

  >>> require_positive(tau=0.2)
  """
  for name, value in values.items():
    must_be = 'positive and finite'
    if isinstance(value, jax.core.Tracer):
      continue
    if is_number(value) and np.ndim(value) == 0 and 0 < concrete(value) < math.inf:
      must_be += f' in float32, from {FLOAT32[0]:.2g} to {FLOAT32[1]:.2g}'
    require(name, value, lambda x: in_float32(x) and x > 0, must_be)


def require_momentum(**values: Any) -> None:
  """Raises a ValueError unless each value is a momentum, in [0, 1).

  >>> require_momentum(momentum=0.9)
  """
  for name, value in values.items():
    require(name, value, lambda m: 0 <= m < 1, 'in [0, 1)')


def require_bool(name: str, value: Any) -> None:
  """Raises a ValueError unless the value is a bool; the string 'no', for example, would count as True.

  >>> require_bool('temperature.gradient', True)
  """
  require(name, value, lambda x: isinstance(x, bool), 'True or False')


def require_choice(name: str, value: Any, known: Collection[str]) -> None:
  """Raises a ValueError that suggests the nearest choice, unless the value is one of `known`.

  >>> require_choice('eval.vote', 'majority', ['cosine', 'majority'])
  """
  if not isinstance(value, str) or value not in known:
    raise ValueError(f'{name} = {show(value)} is not a valid choice: {nearest(value, known)}')


@contextlib.contextmanager
def prefix(section: str) -> Iterator[None]:
  """Inside `with prefix('temperature')`, the ValueError 'tau = ...' becomes 'temperature.tau = ...'.

  >>> with prefix('temperature'):
  ...   require_positive(tau=0.2)
  """
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{section}.{error}') from None


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
  """Whether a value is a dict or dict-like; an ml_collections.ConfigDict is, although it is not a `Mapping`.

  >>> is_mapping(dict(name='constant')), is_mapping(0.2)
  (True, False)
  """
  return hasattr(value, 'keys')


def plain(spec: Mapping[str, Any]) -> dict[str, Any]:
  """Converts a section to nested dicts, which print on one line.

  >>> plain({'name': 'cosine', 'tau_min': {'name': 'linear_schedule'}})
  {'name': 'cosine', 'tau_min': {'name': 'linear_schedule'}}
  """
  return {key: plain(value) if is_mapping(value) else value for key, value in spec.items()}


def show(value: Any) -> str:
  """Formats a value for a message, on one line of limited length: array scalars as numbers, sections as dicts.

  >>> show(np.float32(0.5)), show(10**400)
  ('0.5', '1e+400')
  """
  if isinstance(value, jax.Array | np.number) and np.ndim(value) == 0:
    return f'{float(value):g}'
  if isinstance(value, int) and not isinstance(value, bool) and abs(value) > FLOAT32[1]:
    return f'{decimal.Decimal(value):.0e}'
  text = ' '.join(repr(plain(value) if is_mapping(value) else value).split('\n'))
  return text if len(text) <= LONGEST else f'{text[:LONGEST]}...'
