"""Engines and workloads small enough to check by hand."""

from small_simulations import _engines, _tables, _workload  # noqa: F401  fixtures
