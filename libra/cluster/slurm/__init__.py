"""A cluster of Slurm jobs: a scheduler on the login node, and a Dask worker in each job, submitted
by dask-jobqueue."""
