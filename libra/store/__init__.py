"""The files of a run: journals of trajectories, group records, batch membership, the zarr store, the
event log."""
