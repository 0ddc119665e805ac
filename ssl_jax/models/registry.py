"""From a name and keywords to a module, with the nearest right name where either is wrong."""

from ssl_jax.names import nearest


def create(kind, table, name, *, dtype, axis_name, **kwargs):
  """The module `table[name]`, a partial of its class; it takes of `dtype` and `axis_name` what it has fields for."""
  if name not in table:
    raise ValueError(f'{kind} {name!r} does not exist: {nearest(name, table)}')
  fields = set(table[name].func.__dataclass_fields__) - {'parent', 'name'}
  for key in kwargs:
    if key not in fields:
      raise ValueError(f'{kind} {name!r} has no parameter {key!r}: {nearest(key, sorted(fields))}')
  common = {key: value for key, value in dict(dtype=dtype, axis_name=axis_name).items() if key in fields}
  return table[name](**common, **kwargs)
