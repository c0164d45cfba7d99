"""The services and teachers of a worker."""
