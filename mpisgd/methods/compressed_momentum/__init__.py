"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam have in common: momentum that travels compressed."""
