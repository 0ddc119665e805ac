"""Contrastive self-supervised learning and its temperature, in JAX."""
