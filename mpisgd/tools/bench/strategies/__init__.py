"""Strategies and compressions compared: their accuracy, the time of a step, the bytes that are sent."""
