"""Everything a run keeps: journals of trajectories, group records, batch membership, the zarr store, the event log."""
