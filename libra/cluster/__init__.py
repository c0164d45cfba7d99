"""The Dask cluster of a run: its settings, its workers, and checks of both."""
