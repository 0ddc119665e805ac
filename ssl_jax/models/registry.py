"""From a name and keywords to a module, with the nearest right name where either is wrong."""

from ssl_jax.registry import nearest


def create(table, name, *, dtype, axis_name, **kwargs):
  """The module `table[name]`, a partial of its class; it takes of `dtype` and `axis_name` what it has fields for."""
  if name not in table:
    raise ValueError(f'name = {name!r} does not exist: {nearest(name, table)}')
  has = set(table[name].func.__dataclass_fields__) - {'parent', 'name'}
  fields = has - {'dtype', 'axis_name'}  # which are the run's
  for key in kwargs:
    if key not in fields:
      raise ValueError(f'{key} = {kwargs[key]!r} is no parameter of {name!r}: {nearest(key, sorted(fields))}')
    if isinstance(getattr(table[name].func, key, None), bool) and not isinstance(kwargs[key], bool):
      raise ValueError(f'{key} = {kwargs[key]!r} is no bool: give True or False')
  common = {key: value for key, value in dict(dtype=dtype, axis_name=axis_name).items() if key in has}
  return table[name](**common, **kwargs)
