"""Exchanges of parameters between replicas: schedules, and means over nodes."""
