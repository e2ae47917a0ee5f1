"""What stops and losses of learners cost `DiLoCo(quorum=)`, on a simulated clock and on emulated hosts."""
