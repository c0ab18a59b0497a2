"""Sampling order, data loading by rank, and sharding of a user's own loader."""
