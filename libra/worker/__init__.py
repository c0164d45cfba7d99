"""A run's state on a worker between tasks: engine, replica, trajectory state and checkpoints."""
