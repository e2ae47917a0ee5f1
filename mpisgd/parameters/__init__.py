"""Parameters of a model, with their names: in one order on all ranks, and starting alike."""
