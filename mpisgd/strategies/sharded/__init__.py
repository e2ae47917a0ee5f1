"""Ranks divide the update of the parameters among themselves: on a host, or all of them (ZeRO)."""
