"""Read-only views of a run: dashboard page, task stream, progress, metrics, inspection."""
