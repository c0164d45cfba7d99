"""Iterations as Dask graphs, and the driver that submits them."""
