"""The training of a worker: replica, group, publications, checkpoints and batches."""
