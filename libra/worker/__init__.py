"""What a worker holds of a run between tasks: the host and its members, engine, replica, trajectory state and checkpoints."""
