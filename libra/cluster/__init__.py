"""The Dask cluster a run stands on: its settings, its workers, and what is wrong with them."""
