"""Schedules of pipelines as data: who computes what in which order, with which weights. Nothing runs here."""
