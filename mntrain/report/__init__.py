"""`python -m mntrain report`: pages about runs, from the files that they leave."""
