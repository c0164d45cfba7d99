"""A run's state on a worker between tasks: the host and its members, engine, replica, trajectory state and checkpoints."""
