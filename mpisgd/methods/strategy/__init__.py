"""A strategy: the description that the user writes, its working part, and what these have in common."""
