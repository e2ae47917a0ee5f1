"""Threads and their waits: who runs, how one waits, what the monitor is told of it. Knows no group."""
