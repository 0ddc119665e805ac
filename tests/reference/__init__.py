"""Slow, obvious float64 loops that the package is compared with."""
