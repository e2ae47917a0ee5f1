"""What is trained: models by their layers, counted, by sizes, or from a file; and their blocks."""
