"""Watches one process of a run from outside of it, and ends it when another process is lost. `watch` starts it.

It is a program of its own, with nothing but the standard library, because jax ends a process without a coordinator at
once, from C++: nothing inside the process could still say why. The process's stderr passes through the guard, which
holds it back for a moment. What the loss of another process makes jax say is dropped, and one line names the lost one.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

DELAY = 1.0  # seconds for which stderr is held back
GRACE = (1.0, 3.0)  # seconds until a process that ended with output counts as lost: the first process, the others
PATIENCE = 2.0  # seconds until a process that should end is killed
FAREWELL, FAILED = b'.', b'!'  # what a process sends when it ends


class Guard:
  """The guard of process `own` of `count`, whose id is `parent`.

  `pipe` has its stderr. `links` are connections to the guards of other processes: the first one has all of them, the
  others have that to the first one.
  """

  def __init__(self, own: int, count: int, parent: int, pipe: int, links: dict[int, socket.socket]):
    self.own, self.count, self.parent, self.pipe, self.links = own, count, parent, pipe, links
    self.held: list[tuple[float, bytes]] = []  # what stderr said, and when

  def run(self) -> None:
    """Returns when the process is over."""
    ended = 0.0
    sources = [sys.stdin.fileno(), self.pipe]
    while True:
      links = {link.fileno(): process for process, link in self.links.items()}
      ready, _, _ = select.select([*sources, *links], [], [], 0.05)
      alive = os.getppid() == self.parent  # a child of the process may hold its pipes, so their end says nothing
      if self.pipe in ready and not self._hold():
        sources.remove(self.pipe)
      for link in ready:
        if link in links and (lost := self._hear(links[link])) is not None:
          return self._lost(lost)
      if sys.stdin.fileno() in ready:
        said = os.read(sys.stdin.fileno(), 1)
        if said:
          return self._over(lost=said == FAILED)
        sources.remove(sys.stdin.fileno())
      if not alive:
        ended = ended or time.monotonic()
        if time.monotonic() - ended >= (GRACE[min(self.own, 1)] if self.held else 0):
          return self._over(lost=True)
      else:
        self._say(before=time.monotonic() - DELAY)

  def _hold(self) -> bool:
    """Takes what the process wrote to stderr; False at its end."""
    data = os.read(self.pipe, 1 << 16)
    self.held += [(time.monotonic(), data)] if data else []
    return bool(data)

  def _say(self, before: float = float('inf')) -> None:
    while self.held and self.held[0][0] < before:
      _write(self.held.pop(0)[1])

  def _hear(self, process: int) -> int | None:
    """Reads a message of another guard. -> the process that is lost, if one is"""
    try:
      said = self.links[process].recv(64)
    except OSError:
      said = b''
    if said.startswith(FAREWELL):
      del self.links[process]
      return None
    return int(said.split()[0]) if said else process

  def _tell(self, message: bytes) -> None:
    for link in self.links.values():
      with contextlib.suppress(OSError):  # the other end may be gone
        link.sendall(message + b'\n')

  def _over(self, *, lost: bool) -> None:
    """The process has ended by itself: tells the others whether it was lost or all is well."""
    self._tell(str(self.own).encode() if lost else FAREWELL)
    while select.select([self.pipe], [], [], 0)[0] and self._hold():
      pass
    self._say()

  def _lost(self, process: int) -> None:
    """Another process is lost: names it, and ends this one."""
    self._tell(str(process).encode())
    _write(
      f'ssl_jax: process {process} of {self.count} is lost, so process {self.own} stops (if the other was not killed, '
      'its output says why); start all of them again: training resumes from the last checkpoint\n'.encode()
    )
    os.close(sys.stdout.fileno())  # a thread of the process waits for that, and exits
    until = time.monotonic() + PATIENCE
    while os.getppid() == self.parent:
      if time.monotonic() > until:
        os.kill(self.parent, signal.SIGKILL)
        return
      time.sleep(0.02)


def _write(text: bytes) -> None:
  with contextlib.suppress(OSError):  # nobody reads it
    sys.stderr.buffer.write(text)
    sys.stderr.buffer.flush()


def main() -> None:
  """guard.py OWN COUNT PARENT PIPE [PROCESS:LINK ...], with file descriptors PIPE and LINK."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  own, count, parent, pipe = map(int, sys.argv[1:5])
  links = [map(int, link.split(':')) for link in sys.argv[5:]]
  Guard(own, count, parent, pipe, {process: socket.socket(fileno=link) for process, link in links}).run()


if __name__ == '__main__':
  main()
