"""Verification: the first steps on all ranks, beside those of one process."""
