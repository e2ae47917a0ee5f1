"""Deep gradient compression."""
