"""The driver of a run: checks, session, repair, replanning, and the scheduler's client."""
