"""Which gradients travel together (a pure plan), and the flat storage they live in."""
