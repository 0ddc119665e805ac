"""Ends a process soon after another one of its run is lost. Without it, collectives wait for the lost one.

Every process has a TCP connection to the first one. The system closes a connection with its process, however that
ends; a lost host is noticed by keep-alive probes. The first process tells the others which one is lost.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from typing import NoReturn

import jax
import numpy as np
from jax._src import distributed  # the address of the coordinator has no public name
from jax.experimental import multihost_utils

REACTION = 5.0  # seconds in which the loss of a process is noticed, where its system is alive
JOIN = 60.0  # seconds until all processes are connected
PROBES = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 4}  # a lost host is noticed after 30 seconds
FAREWELL = b'.'

_links: dict[int, socket.socket] = {}  # by process


def start() -> None:
  """Connects the processes of this run; nothing if there is only one."""
  if jax.process_count() == 1:
    return
  first = jax.process_index() == 0
  server = _server() if first else None
  port = server.getsockname()[1] if server else 0
  secret = [secrets.randbits(31) for _ in range(4)]  # a stranger who finds the port is not listened to
  known = multihost_utils.broadcast_one_to_all(np.array([port, *secret], np.int32))
  port, token = int(known[0]), known[1:].tobytes()
  try:
    if server:
      _accept(server, token)
    else:
      host = str(distributed.global_state.coordinator_address).rsplit(':', 1)[0].strip('[]')
      _links[0] = socket.create_connection((host, port), timeout=JOIN)
      _links[0].sendall(token + jax.process_index().to_bytes(4, 'big'))
  except OSError as error:
    print(f'ssl_jax: warning: processes do not watch one another ({error})', file=sys.stderr, flush=True)
    return
  for process, link in _links.items():
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
      if hasattr(socket, name):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    threading.Thread(target=_watch, args=(process, link), daemon=True).start()


def end() -> None:
  """Says farewell: this process ends as it should."""
  for link in _links.values():
    _send(link, FAREWELL)
  _links.clear()


def active() -> bool:
  """Whether other processes are watched."""
  return bool(_links)


def fail(message: str) -> NoReturn:
  """Ends this process at once with a message; the others are told. A normal exit would wait for them."""
  os.write(2, f'{message}\n'.encode())  # not by way of Python's streams, which another thread may hold
  os._exit(1)


def _server() -> socket.socket:
  if socket.has_dualstack_ipv6():
    return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
  return socket.create_server(('', 0))


def _accept(server: socket.socket, token: bytes) -> None:
  """Waits for every other process."""
  until = time.monotonic() + JOIN
  with server:
    while len(_links) < jax.process_count() - 1:
      server.settimeout(max(0.1, until - time.monotonic()))
      link, _ = server.accept()
      link.settimeout(5)
      said = link.recv(len(token) + 4, socket.MSG_WAITALL)
      if said.startswith(token):
        _links[int.from_bytes(said[len(token) :], 'big')] = link
      else:
        link.close()


def _watch(process: int, link: socket.socket) -> None:
  """Waits for the end of a connection, or for the name of the process that is lost."""
  try:
    said = link.recv(16)
  except OSError:
    said = b''
  if said.startswith(FAREWELL) or process not in _links:
    return
  lost = int(said) if said else process
  for other, one in list(_links.items()):
    if other != process:
      _send(one, str(lost).encode())
  fail(
    f'ssl_jax: process {lost} of {jax.process_count()} is lost, so process {jax.process_index()} stops (if the other '
    'was not killed, its output says why); start all of them again, and they resume from the last checkpoint'
  )


def _send(link: socket.socket, text: bytes) -> None:
  with contextlib.suppress(OSError):  # the other end may be gone
    link.sendall(text)
