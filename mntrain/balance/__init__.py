"""Unequal ranks: their speeds by one clock, and parts of a batch or whole micro-batches by them."""
