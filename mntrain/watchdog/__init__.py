"""Observation of running ranks, beside MPI: who waits for whom, and who was lost."""
