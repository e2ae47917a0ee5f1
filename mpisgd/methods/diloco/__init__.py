"""DiLoCo."""
