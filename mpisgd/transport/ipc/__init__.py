"""Memory that the ranks of a host share (memfd, segments), and how they wait in it (futex, barrier)."""
