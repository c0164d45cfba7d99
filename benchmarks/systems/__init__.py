"""Training systems compared in virtual time: `python -m benchmarks.systems CONFIG`, and what `benchmarks.pipeline` scores."""
