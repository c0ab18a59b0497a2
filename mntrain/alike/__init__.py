"""Comparison of everything that all ranks must have alike, before any work: one error on all."""
