"""Tests on a GPU that run inside MPI ranks: test_gpu_suite.py, a folder up, launches them."""
