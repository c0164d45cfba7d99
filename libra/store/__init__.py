"""The files of a run: journals, group records, batch records, the zarr store and the event log."""
