"""The global resource planner: what rollout and training cost, and how to split GPUs between them. Pure."""
