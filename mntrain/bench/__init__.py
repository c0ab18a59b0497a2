"""`python -m mntrain bench`: how fast the collectives are here, beside what they could be."""
