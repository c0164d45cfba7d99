"""Questions whose answers are found by searching a local corpus."""
