"""Locks between processes that write the same data."""

import fcntl
from collections.abc import Callable
from typing import IO


def acquire(file: int | IO, waiting: Callable[[], None]) -> bool:
  """Locks an open file or folder until it is closed. False on a file system without locks.

  If another process holds the lock, calls `waiting` (which tells the user) and then waits.
  """
  try:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      waiting()
      fcntl.flock(file, fcntl.LOCK_EX)
  except OSError:
    return False
  return True
