"""What submits a run: the session that a program holds, recovery, replanning, and the clients of the scheduler."""
