"""`bench memory`: the peak memory of trainings, each of them a job that is sampled from outside."""
