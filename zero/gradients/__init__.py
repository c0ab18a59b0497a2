"""Gradients of a step: their memory, buckets, weights and reduction over ranks."""
