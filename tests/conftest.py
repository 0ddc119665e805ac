"""Every test runs on four CPU devices, with no silent broadcasting, no silent promotion and no warnings."""

import os
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'

import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')

# Many tests train the same few networks: each is compiled once.
_CACHE = tempfile.TemporaryDirectory()
jax.config.update('jax_compilation_cache_dir', _CACHE.name)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
