"""The driver of a run: session, checks, recovery, repair, replanning, and the client of the scheduler."""
