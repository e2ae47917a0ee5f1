"""What gradients look like on the wire."""
