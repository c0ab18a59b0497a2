"""The last events of each rank in a file that outlives it, and how a job ended by these."""
