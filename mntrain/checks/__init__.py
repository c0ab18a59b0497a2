"""Checks of a job before it trains: launcher, hosts, and what must be alike on all ranks.

A check is a function that returns a `Finding`: pass, warn or fail, one sentence, and the fix.

    launcher.py    before MPI starts, and of the size of the world; from the environment
    before_mpi.py  those that come before MPI starts
    host.py        of one host: shared memory, limits
    storage.py     of the run directory
    all_ranks.py  over the facts of all ranks (facts.py); to add one, write a function of the facts
                   and name it in CHECKS
"""
