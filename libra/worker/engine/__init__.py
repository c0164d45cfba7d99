"""The engine of a worker: its kind, its checks, its weights and its KV."""
