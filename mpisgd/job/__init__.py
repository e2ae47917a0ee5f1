"""The start and the end of a job: launch facts, groups, the exception hook, shutdown."""
