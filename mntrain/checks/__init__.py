"""Checks of a job before it trains: launcher, hosts, and what must be alike on all ranks.

A check is a function that returns a `Finding`: pass, warn or fail, one sentence, and the fix.

    launcher.py    of the launcher against the MPI library, from the environment
    host.py        of one host: shared memory, limits; those that come before MPI starts
    storage.py     of the run directory
    all_ranks.py   over the facts of all ranks; to add one, write a function of the facts and name
                   it in CHECKS
"""
