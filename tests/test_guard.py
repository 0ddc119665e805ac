"""The guard of a process: what it says and tells, when its process or another one ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from ssl_jax.run import guard

# A process without jax: it starts its guard as `watch` does, says something on stderr, and ends as it is told.
PROCESS = """
import os, signal, subprocess, sys, threading
guard, own, link = sys.argv[1:]
read, write = os.pipe()
child = subprocess.Popen(
  [sys.executable, '-I', '-S', guard, own, '2', str(os.getpid()), str(read), f'{1 - int(own)}:{link}'],
  stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[read, int(link)], start_new_session=True,
)
os.close(int(link))
os.dup2(write, 2)

def obey():
  child.stdout.read()
  if last != '.':
    os._exit(1)

last = ''
threading.Thread(target=obey, daemon=True).start()
print('said on stderr', file=sys.stderr, flush=True)
print('ready', flush=True)
last = sys.stdin.read(1)
if last == 'k':
  os.kill(os.getpid(), signal.SIGKILL)
os.write(child.stdin.fileno(), last.encode())
child.wait()
"""


@contextlib.contextmanager
def guarded(own):
  """A process with a guard, and the connection to the guard of the other one."""
  ours, theirs = socket.socketpair()
  ours.settimeout(30)
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  program = [sys.executable, '-I', '-S', '-c', PROCESS, guard.__file__, str(own), str(theirs.fileno())]
  with ours, subprocess.Popen(program, pass_fds=[theirs.fileno()], **pipes) as process:
    theirs.close()
    assert process.stdout.readline() == 'ready\n'
    yield process, ours
    process.kill()


LINE = 'ssl_jax: process 1 of 2 is lost, so process 0 stops ('


@pytest.mark.parametrize('how', ['named', 'connection closed'])
def test_the_loss_of_another_process_ends_this_one_in_one_line(how):
  with guarded(own=0) as (process, link):
    link.sendall(b'1\n') if how == 'named' else link.shutdown(socket.SHUT_RDWR)
    _, said = process.communicate(timeout=30)
  assert process.returncode == 1
  assert said.startswith(LINE) and said.count('\n') == 1, said


@pytest.mark.slow  # it waits
def test_a_process_that_cannot_exit_is_killed():
  with guarded(own=0) as (process, link):
    os.kill(process.pid, signal.SIGSTOP)
    link.sendall(b'1\n')
    assert process.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize('own', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_end_of_a_process_is_told(own):
  with guarded(own) as (process, link):
    process.communicate('k', timeout=30)
    assert link.recv(64) == f'{own}\n'.encode()


def test_a_failure_is_told():
  with guarded(own=1) as (process, link):
    _, said = process.communicate('!', timeout=30)
    assert (link.recv(64), said) == (b'1\n', 'said on stderr\n')


def test_after_a_farewell_nobody_is_lost():
  with guarded(own=1) as (process, link):
    link.sendall(guard.FAREWELL + b'\n')  # the other process ends
    link.close()
    _, said = process.communicate('.', timeout=30)
  assert (process.returncode, said) == (0, 'said on stderr\n')


def test_stderr_is_passed_on_after_a_moment():
  with guarded(own=0) as (process, _):
    assert process.stderr.readline() == 'said on stderr\n'
    assert process.poll() is None
