"""What an operation of a group is: its ranks, order, consistency check and `Work`. Imports no transport."""
