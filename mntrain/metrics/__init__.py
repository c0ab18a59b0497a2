"""Metrics of a run: declarations, measurements and reports."""
