"""Exchanges of parameters between replicas, and means over nodes."""
