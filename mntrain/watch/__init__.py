"""Observation of running ranks, beside MPI: who waits for whom, who was lost, and what failed."""
