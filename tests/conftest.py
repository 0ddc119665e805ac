"""Every test runs on four CPU devices, with no silent broadcasting, no silent promotion and no warnings."""

import gc
import importlib.metadata
import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'
os.environ['XLA_FLAGS'] += ' --xla_cpu_multi_thread_eigen=false'  # the workers of `make test` share the cores
for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):  # threads of numpy, scikit-learn and torch wait actively
  os.environ.setdefault(name, '1')

# Many tests train the same few networks: each is compiled once, for all workers and for the processes they start.
_CACHE = tempfile.TemporaryDirectory()
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', _CACHE.name)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.3'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'

# And without optimisation: the programs are small, so compiling them is what takes time.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
os.environ['XLA_FLAGS'] += ' --xla_cpu_parallel_codegen_split_count=1'  # the default, 32 parts, takes longer
if importlib.metadata.version('jaxlib').startswith('0.10.'):  # later ones have no choice of emitters
  os.environ['XLA_FLAGS'] += ' --xla_cpu_use_fusion_emitters=false'

import jax  # noqa: E402
import pytest  # noqa: E402

# tfds replaces `__import__` while it is imported: import it before there is garbage whose finalizers import.
import tensorflow_datasets  # noqa: E402, F401

# The longest first (`make test` keeps this order), so that no file is left to one worker while the other has none.
LONGEST = (
  'test_reproduce',
  'test_training',
  'test_parallel',
  'test_train',
  'test_state',
  'test_blocks',
  'test_evaluate',
  'test_resume',
)


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_runtest_setup(item):
  if item.get_closest_marker('real_data') and not os.environ.get('SSL_JAX_TEST_DATA'):
    pytest.skip('SSL_JAX_TEST_DATA is not set to a folder of real data')
  if item.get_closest_marker('browser') and shutil.which('chromium') is None:
    pytest.skip('chromium is not installed')


def pytest_runtest_teardown(item, nextitem):
  """Drops the programs of a file with its last test: a process that reaches Linux's limit of 65,530 maps crashes."""
  if nextitem is None or nextitem.path != item.path:
    jax.clear_caches()


def pytest_collection_finish():
  gc.freeze()  # the modules stay: the garbage collector, which jax's tracing wakes often, need not look at them again
  gc.set_threshold(20_000, 20, 20)


jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
