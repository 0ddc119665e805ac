"""Contrastive self-supervised learning and its temperature, in JAX."""

__version__ = '0.1.0'
