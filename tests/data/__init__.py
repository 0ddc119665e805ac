"""Tests of the input; some need real images, in the folder that SSL_JAX_TEST_DATA names."""

import os

import pytest

REAL = os.environ.get('SSL_JAX_TEST_DATA', '')
needs_real_data = pytest.mark.skipif(not REAL, reason='SSL_JAX_TEST_DATA does not name the folder of real data')
