"""Collective algorithms, found by name in a registry."""
