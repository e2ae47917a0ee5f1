"""SparseLoCo: DiLoCo in which the largest changes of each chunk travel, in a few bits."""
