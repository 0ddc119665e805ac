"""Ends all processes of a run soon after one of them is lost. Otherwise, collectives would wait for the lost process.

Each process starts a guard, a small separate program (`guard.py`). Every guard has a TCP connection to the guard of the
first process. A guard notices immediately if its process ends unannounced. If a guard itself ends, the operating system
closes its connection. Keep-alive probes detect a lost host.
"""

import os
import pathlib
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from ssl_jax.run import guard

REACTION = 5.0  # seconds within which the loss of a process is noticed, if its host is alive
JOIN = 20.0  # seconds in which all processes must connect; a collective fails after 30
PROBES = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 4}  # a lost host is noticed after 30 seconds
TOKEN = 16  # bytes of the token; a connection without it is rejected
HOSTS = 512  # bytes for the host names of the first process

_guard: 'subprocess.Popen[bytes] | None' = None
_stderr = 2  # file descriptor of the original stderr, not of the pipe to the guard


def start() -> None:
  """Starts and connects the guard of this process. Does nothing if there is only one process."""
  if jax.process_count() == 1:
    return
  links, problem = _connect()
  problems = multihost_utils.process_allgather(np.array(bool(problem)))
  if not problems.any():
    _start_guard(links)
  elif problem or jax.process_index() == 0:
    why = problem or f'process {int(np.argmax(problems))} is not connected'
    print(f'ssl_jax: warning: the processes do not watch one another ({why})', file=sys.stderr, flush=True)
  for link in links.values():
    link.close()  # the guard has its own copy


def end() -> None:
  """Waits for the other processes and announces the normal end of this one."""
  if active():
    jax.distributed.shutdown()
    _dismiss(guard.FAREWELL)


def active() -> bool:
  """Whether this process has a guard."""
  return _guard is not None


def fail(message: str) -> NoReturn:
  """Ends this process with a message and notifies the other processes. A normal exit would wait for them."""
  time.sleep(guard.DELAY)  # if the loss of another process is the cause, the guard ends this one first
  _dismiss(guard.FAILED)
  os.write(_stderr, f'{message}\n'.encode())  # not through Python's streams, which another thread may have locked
  os._exit(1)


def _connect() -> tuple[dict[int, socket.socket], str]:
  """Connects every process to the first one.  -> (connections by process number, error message or '')"""
  first, links = jax.process_index() == 0, {}
  server = _server() if first else None
  port = server.getsockname()[1] if server else 0
  mine = port.to_bytes(4, 'big') + secrets.token_bytes(TOKEN) + ','.join(_hosts()).encode()[:HOSTS].ljust(HOSTS)
  known = multihost_utils.broadcast_one_to_all(np.frombuffer(mine, np.uint8)).tobytes()
  port, token, hosts = int.from_bytes(known[:4], 'big'), known[4 : 4 + TOKEN], known[4 + TOKEN :].decode().split(',')
  try:
    links = _accept(server, token) if server else {0: _join([host.strip() for host in hosts], port, token)}
    for link in links.values():
      link.settimeout(None)
      link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      for name, value in PROBES.items():
        if hasattr(socket, name):
          link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
  except OSError as error:
    return links, str(error)
  return links, ''


def _hosts() -> list[str]:
  """Names and addresses of this host for other processes, the most likely first."""
  given = os.environ.get('JAX_COORDINATOR_ADDRESS', '').rpartition(':')[0].strip('[]')
  try:
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
  except OSError:
    found = []
  return list(dict.fromkeys(name for name in (given, socket.gethostname(), *found) if name))


def _server() -> socket.socket:
  if socket.has_dualstack_ipv6():
    return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
  return socket.create_server(('', 0))


def _join(hosts: Sequence[str], port: int, token: bytes) -> socket.socket:
  """Connects to the first process, trying its host names in order."""
  problem = OSError('the first process has no name')
  for host in hosts:
    try:
      link = socket.create_connection((host, port), timeout=JOIN / (2 * len(hosts)))
      link.sendall(token + jax.process_index().to_bytes(4, 'big'))
      if link.recv(1) == guard.FAREWELL:  # the token was accepted: this is not another host of that name
        return link
    except OSError as error:
      problem = error
  raise problem


def _accept(server: socket.socket, token: bytes) -> dict[int, socket.socket]:
  """Accepts a connection from every other process."""
  links: dict[int, socket.socket] = {}
  until = time.monotonic() + JOIN
  with server:
    while len(links) < jax.process_count() - 1:
      server.settimeout(max(0.1, until - time.monotonic()))
      link, _ = server.accept()
      link.settimeout(5)
      said = link.recv(len(token) + 4, socket.MSG_WAITALL)
      if said.startswith(token):
        link.sendall(guard.FAREWELL)
        links[int.from_bytes(said[len(token) :], 'big')] = link
      else:
        link.close()
  return links


def _start_guard(links: dict[int, socket.socket]) -> None:
  """Starts the guard of this process and redirects stderr to it."""
  global _guard, _stderr
  sys.stderr.flush()
  read, write = os.pipe()
  given = [jax.process_index(), jax.process_count(), os.getpid(), read]
  joined = [f'{process}:{link.fileno()}' for process, link in links.items()]
  _guard = subprocess.Popen(
    [sys.executable, '-I', '-S', str(pathlib.Path(guard.__file__)), *map(str, given), *joined],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    pass_fds=[read, *(link.fileno() for link in links.values())],
    start_new_session=True,  # so that signals to the terminal's process group do not reach it
  )
  os.close(read)
  _stderr = os.dup(2)
  os.dup2(write, 2)
  os.close(write)
  threading.Thread(target=_obey, args=(_guard,), daemon=True).start()


def _obey(own: 'subprocess.Popen[bytes]') -> None:
  """Exits the process when the guard closes its stdout or ends."""
  assert own.stdout is not None
  own.stdout.read()
  if _guard is own:
    os._exit(1)


def _dismiss(last: bytes) -> None:
  """Tells the guard how this process ends, and waits until it has forwarded the stderr output."""
  global _guard
  own, _guard = _guard, None
  if own is None:
    return
  assert own.stdin is not None
  os.dup2(_stderr, 2)
  try:
    os.write(own.stdin.fileno(), last)
    own.wait(timeout=5)
  except (OSError, subprocess.TimeoutExpired):
    pass
