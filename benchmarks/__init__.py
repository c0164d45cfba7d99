"""Benchmarks: each module runs as ``python -m benchmarks.NAME --json`` and prints one JSON object as its last line."""
