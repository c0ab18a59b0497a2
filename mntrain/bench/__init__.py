"""`python -m mntrain bench`: measure the collectives and compare them with hardware limits."""
