"""Max-pooling with a fast and deterministic gradient.

XLA computes the gradient of overlapping max-pooling by a scatter, in which windows add to the same pixel in any order.
Its deterministic version is slow: the small AlexNet trains about three times slower. Here, the forward pass stores
which pixel of a window was the first maximum, in one byte. The backward pass gathers: each pixel adds the gradients of
the windows around it in a fixed order.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from ssl_jax.arrays import to_float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(x: jax.Array, window: int, stride: int, padding: int = 0) -> jax.Array:
  """The maximum of each window; among equal maxima, the first gets the gradient.  [N, H, W, C] -> [N, H', W', C]

  >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1), window=3, stride=2).tolist()
  [[[[8.0]]]]
  """
  return _pool(x, window, stride, padding)[0]


def _pool(x, window, stride, padding):
  """The maximum of each window, and its position in the window as one number."""
  border = (padding, padding, 0)
  x = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), [(0, 0, 0), border, border, (0, 0, 0)])
  last = [n - (n - window) % stride for n in x.shape[1:3]]

  def shifted(i, j):
    ends = (x.shape[0], last[0] - window + 1 + i, last[1] - window + 1 + j, x.shape[3])
    return lax.slice(x, (0, i, j, 0), ends, (1, stride, stride, 1))

  best = shifted(0, 0)
  position = jnp.zeros(best.shape, jnp.uint8)
  for k, (i, j) in enumerate(itertools.product(range(window), repeat=2)):
    candidate = shifted(i, j)
    position = jnp.where(candidate > best, jnp.uint8(k), position)
    best = jnp.maximum(best, candidate)
  return best, position


def _forward(x, window, stride, padding):
  best, position = _pool(x, window, stride, padding)
  return best, (position, jnp.zeros((0, *x.shape[1:3]), x.dtype))  # the empty array stores the size of x


def _backward(window, stride, padding, saved, gradient):
  """Pixels at the same place of a stride × stride cell get gradients from the same positions of the windows."""
  position, empty = saved
  sizes = [n + 2 * padding for n in empty.shape[1:]]
  cells = [-(-n // stride) for n in sizes]
  gradient, dtype = to_float32(gradient), gradient.dtype

  def at(row, column):
    """The gradient of one pixel of each cell."""
    total = jnp.zeros((), gradient.dtype)
    for i, j in itertools.product(range(row, window, stride), range(column, window, stride)):
      sent = jnp.where(position == window * i + j, gradient, 0)
      before = (i // stride, j // stride)
      borders = [(b, n - b - m, 0) for b, n, m in zip(before, cells, gradient.shape[1:3], strict=True)]
      total = total + lax.pad(sent, jnp.zeros((), sent.dtype), [(0, 0, 0), *borders, (0, 0, 0)])
    return jnp.broadcast_to(total, (len(gradient), *cells, gradient.shape[3])).astype(dtype)

  pixels = range(stride)
  total = jnp.stack([jnp.stack([at(row, column) for column in pixels], 3) for row in pixels], 2)
  total = total.reshape(len(gradient), *(stride * n for n in cells), -1)
  rows, columns = (slice(padding, n - padding) for n in sizes)
  return (total[:, rows, columns],)


max_pool.defvjp(_forward, _backward)
