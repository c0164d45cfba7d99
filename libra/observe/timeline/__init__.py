"""The timeline of a run's facts, for page, report, trace, Prometheus and step measures."""
