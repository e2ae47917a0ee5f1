"""Models whose parameters are in files, and in memory layer by layer."""
