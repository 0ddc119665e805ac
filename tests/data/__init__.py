"""Tests of the data. Some need real images, in the folder given by SSL_JAX_TEST_DATA."""

import os

import pytest

REAL = os.environ.get('SSL_JAX_TEST_DATA', '')
needs_real_data = pytest.mark.skipif(not REAL, reason='SSL_JAX_TEST_DATA is not set to a folder of real data')
