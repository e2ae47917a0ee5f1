"""Random divisions of data among ranks inside `join()`."""
