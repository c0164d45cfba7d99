"""Everything that shows a run and changes nothing in it: dashboard page, task stream, progress, metrics, inspection."""
