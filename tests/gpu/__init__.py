"""Tests that need a CUDA device; those in `ranks` run inside MPI ranks, which share it.

A package, so that its modules may be named like those of the other folders of tests.
"""
