"""See `horovod`."""
