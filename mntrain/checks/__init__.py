"""Checks of a job before it trains: launcher, hosts, and what must be alike on all ranks."""
