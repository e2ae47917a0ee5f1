"""Cross-memory attach (CMA): ranks of a host read and write each other's memory through the kernel."""
