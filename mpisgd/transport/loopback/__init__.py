"""Ranks as threads of one process: who runs, and how long a message takes, a seeded scheduler decides."""
