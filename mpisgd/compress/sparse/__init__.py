"""A few elements of each gradient travel, as values and indices: which ones, and how they are summed."""
