"""Remote memory access: memory of each rank that the others read and write without its doing anything."""
