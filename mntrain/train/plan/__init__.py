"""The command `plan`: what a job will take, before it runs. One process, without MPI."""
