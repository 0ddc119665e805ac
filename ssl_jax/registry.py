"""From a config section, `name` and parameters, to the thing that it names, with every mistake as one line.

A table maps names to functions, classes or partials of them. `build` finds the entry, checks that it takes the given
parameters, and calls it; `find` does the same without the call. The entry checks the values of its parameters with
`require`, so that they are checked for callers without a config as well.
"""

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

LISTED = 50  # names in an error message, at most


class Found(NamedTuple):
  """An entry of a table, and the parameters that a config section gives it.

  >>> Found('round', round, {'ndigits': 1}).entry(0.26, ndigits=1)
  0.3
  """

  name: str
  entry: Callable[..., Any]
  parameters: dict[str, Any]


def find(section: str, spec: Mapping[str, Any], table: Mapping[str, Callable], given: Collection[str] = ()) -> Found:
  """The entry of `table` that `spec` names, and its parameters, checked against the entry's signature.

  Args:
    section: where the spec stands in the config, for messages.
    spec: a mapping with `name` and the parameters of what it names.
    table: functions, classes or partials by name; the keywords of a partial are defaults.
    given: arguments that the caller provides, which the spec must not set.

  >>> find('precision', dict(name='round', ndigits=2), {'round': round}, given=['number']).parameters
  {'ndigits': 2}
  """
  if not is_mapping(spec):
    raise ValueError(f'{section} = {spec!r} must be a mapping, such as dict(name={next(iter(table))!r})')
  parameters = plain(spec)
  name = parameters.pop('name', None)
  if name is None:
    raise ValueError(f'{section}.name is missing: give one of {", ".join(table)}')
  if name not in table:
    raise ValueError(f'{section}.name = {name!r} is not a known {section.rpartition(".")[2]}: {nearest(name, table)}')
  known = {key: p for key, p in arguments(table[name]).items() if key not in given}
  for key, value in parameters.items():
    if key not in known:
      raise ValueError(f'{section}.{key} = {value!r} is not a parameter of {name!r}: {nearest(key, known)}')
    if isinstance(known[key].default, bool):
      require_bool(f'{section}.{key}', value)
  for key, parameter in known.items():
    if parameter.default is parameter.empty and key not in parameters:
      raise ValueError(f'{section}.{key} is missing: {name!r} needs {", ".join(known)}')
  return Found(name, table[name], parameters)


def build(section: str, spec: Mapping[str, Any], table: Mapping[str, Callable], **given: Any) -> Any:
  """What `spec` names in `table`, called with its parameters and with those of `given` that it takes.

  >>> build('number', dict(name='complex', imag=2.0), {'complex': complex}, real=1.0)
  (1+2j)
  """
  found = find(section, spec, table, given)
  taken = arguments(found.entry)
  with prefix(section):
    return found.entry(**found.parameters, **{key: value for key, value in given.items() if key in taken})


@functools.cache
def arguments(entry: Callable) -> dict[str, inspect.Parameter]:
  """The arguments of a function, of a class or of a partial of either; those that flax adds to a module are left out.

  >>> list(arguments(functools.partial(round, ndigits=1)))
  ['number', 'ndigits']
  """
  fields = getattr(getattr(entry, 'func', entry), '__dataclass_fields__', {})
  of_flax = {'parent', 'name'} if 'parent' in fields else set()
  return {key: p for key, p in inspect.signature(entry).parameters.items() if key not in of_flax}


def nearest(name: Any, known: Collection[str]) -> str:
  """How to fix a wrong name: "did you mean 'cosine'?", or the names there are.

  >>> nearest('cosin', ['constant', 'cosine'])
  "did you mean 'cosine'?"
  """
  known = [entry for entry in known if entry]
  if close := difflib.get_close_matches(str(name), known, n=1):
    return f'did you mean {close[0]!r}?'
  shown = known if len(known) <= LISTED else [*known[:LISTED], '...']
  return f'give one of {", ".join(shown)}' if shown else 'leave it out'


def require(name: str, value: Any, holds: Callable[[Any], Any], must_be: str) -> None:
  """Raises a ValueError, '{name} = {value} must be {must_be}', unless `holds(value)`.

  A value known only inside jit is not checked.

  >>> require('fraction', 0.5, lambda x: 0 < x <= 1, 'in (0, 1]')
  """
  if isinstance(value, jax.core.Tracer):
    return
  try:
    valid = bool(holds(value))
  except (TypeError, ValueError, IndexError, OverflowError):  # a value of another type
    valid = False
  if not valid:
    raise ValueError(f'{name} = {show(value)} must be {must_be}')


def require_positive(**values: Any) -> None:
  """Raises a ValueError unless each value is a positive and finite number.

  >>> require_positive(tau=0.2)
  """
  for name, value in values.items():
    require(name, value, lambda x: 0 < x < math.inf, 'positive and finite')


def require_bool(name: str, value: Any) -> None:
  """Raises a ValueError unless the value is a bool; the text 'no' would count as True.

  >>> require_bool('temperature.gradient', True)
  """
  require(name, value, lambda x: isinstance(x, bool), 'True or False')


def require_choice(name: str, value: Any, known: Collection[str]) -> None:
  """Raises a ValueError with the nearest choice unless the value is one of those known.

  >>> require_choice('eval.vote', 'majority', ['cosine', 'majority'])
  """
  if value not in known:
    raise ValueError(f'{name} = {value!r} is not a valid choice: {nearest(value, known)}')


@contextlib.contextmanager
def prefix(section: str) -> Iterator[None]:
  """In `with prefix('temperature')`, the ValueError 'tau = ...' reads 'temperature.tau = ...'.

  >>> with prefix('temperature'):
  ...   require_positive(tau=0.2)
  """
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{section}.{error}') from None


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
  """Whether a value is a dict or like one: an ml_collections.ConfigDict is not a `Mapping`.

  >>> is_mapping(dict(name='constant')), is_mapping(0.2)
  (True, False)
  """
  return hasattr(value, 'keys')


def plain(spec: Mapping[str, Any]) -> dict[str, Any]:
  """A section as nested dicts, which print in one line.

  >>> plain({'name': 'cosine', 'tau_min': {'name': 'linear_schedule'}})
  {'name': 'cosine', 'tau_min': {'name': 'linear_schedule'}}
  """
  return {key: plain(value) if is_mapping(value) else value for key, value in spec.items()}


def show(value: Any) -> str:
  """A value in a message: scalars of jax and numpy as numbers.

  >>> show(np.float32(0.5))
  '0.5'
  """
  return f'{float(value):g}' if isinstance(value, jax.Array | np.number) and np.ndim(value) == 0 else repr(value)
