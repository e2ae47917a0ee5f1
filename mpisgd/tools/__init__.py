"""Benchmarks, predictions, verification, reports and commands; no module outside imports them."""
