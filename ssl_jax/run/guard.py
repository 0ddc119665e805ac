"""Watches one process of a multi-process run and ends it when another process is lost. `watch` starts it.

The guard is a separate program that uses only the standard library. When the coordinator is lost, JAX terminates the
process immediately, from C++, so that no code inside the process could report the reason. The process's stderr passes
through the guard, which delays it. When another process is lost, JAX's messages about it are dropped, and one line
names the lost process.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

DELAY = 1.0  # seconds by which stderr is delayed
# Seconds until a process that ended with pending stderr output counts as lost: for the first process, for the others.
GRACE = (1.0, 3.0)
PATIENCE = 2.0  # seconds until a process that should exit is killed
FAREWELL, FAILED = b'.', b'!'  # sent by a process when it ends: normally, or after an error


class Guard:
  """The guard of process number `own` of `count`, whose operating-system id is `parent`.

  The process writes its stderr to `pipe`. `links` are connections to other guards by process number: the first guard is
  connected to all others, and every other guard only to the first.
  """

  def __init__(self, own: int, count: int, parent: int, pipe: int, links: dict[int, socket.socket]):
    self.own, self.count, self.parent, self.pipe, self.links = own, count, parent, pipe, links
    self.held: list[tuple[float, bytes]] = []  # (time, stderr output) that is not forwarded yet

  def run(self) -> None:
    """Watches until the process ends."""
    ended = 0.0
    sources = [sys.stdin.fileno(), self.pipe]
    while True:
      links = {link.fileno(): process for process, link in self.links.items()}
      ready, _, _ = select.select([*sources, *links], [], [], 0.05)
      alive = os.getppid() == self.parent  # closed pipes are no sign: a child process may keep them open
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
    """Reads and stores stderr output of the process. Returns False at the end of the stream."""
    data = os.read(self.pipe, 1 << 16)
    self.held += [(time.monotonic(), data)] if data else []
    return bool(data)

  def _say(self, before: float = float('inf')) -> None:
    while self.held and self.held[0][0] < before:
      _write(self.held.pop(0)[1])

  def _hear(self, process: int) -> int | None:
    """Reads a message from another guard.  -> the number of the lost process, or None"""
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
      with contextlib.suppress(OSError):  # the other guard may be gone
        link.sendall(message + b'\n')

  def _over(self, *, lost: bool) -> None:
    """Handles the end of this process: tells the other guards whether it was lost, and forwards all stderr output."""
    self._tell(str(self.own).encode() if lost else FAREWELL)
    while select.select([self.pipe], [], [], 0)[0] and self._hold():
      pass
    self._say()

  def _lost(self, process: int) -> None:
    """Handles the loss of another process: reports it and ends this process."""
    self._tell(str(process).encode())
    _write(
      f'ssl_jax: process {process} of {self.count} is lost, so process {self.own} stops (if the other was not killed, '
      'its output says why); start all of them again: training resumes from the last checkpoint\n'.encode()
    )
    os.close(sys.stdout.fileno())  # a thread of the process (`watch._obey`) waits for this and exits
    until = time.monotonic() + PATIENCE
    while os.getppid() == self.parent:
      if time.monotonic() > until:
        os.kill(self.parent, signal.SIGKILL)
        return
      time.sleep(0.02)


def _write(text: bytes) -> None:
  with contextlib.suppress(OSError):  # the reader may be gone
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
