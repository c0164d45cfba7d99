"""The timeline of a run, folded from its facts: who runs and waits where, worker time by cause, steps, counts, decisions.

Page, report, trace, Prometheus and the measurement of steps read it; nothing here reads a clock.
"""
