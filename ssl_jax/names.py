"""The right name for a wrong one, for every error that is about a name."""

import difflib
from collections.abc import Collection
from typing import Any

LISTED = 50  # names in an error, at most


def nearest(name: Any, known: Collection[str]) -> str:
  """A clause that mends it: "did you mean 'cosine'?", or the names there are.

  >>> nearest('cosin', ['constant', 'cosine'])
  "did you mean 'cosine'?"
  """
  known = list(known)
  if close := difflib.get_close_matches(str(name), known, n=1):
    return f'did you mean {close[0]!r}?'
  known = [name for name in known if name]
  shown = known if len(known) <= LISTED else [*known[:LISTED], '...']
  return f'give one of {", ".join(shown)}' if shown else 'leave it out'
