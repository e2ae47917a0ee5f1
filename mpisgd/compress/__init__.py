"""What gradients look like on the wire: one method of compression per file."""
