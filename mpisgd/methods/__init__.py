"""One folder for each method of training: so far its paper, the algorithm with all ranks in one process."""
