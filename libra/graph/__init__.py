"""One RL iteration as one Dask graph: the graph and the task functions of its nodes."""
