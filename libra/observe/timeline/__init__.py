"""The timeline of a run, folded from its facts, for page, report, trace, Prometheus and step
measures."""
