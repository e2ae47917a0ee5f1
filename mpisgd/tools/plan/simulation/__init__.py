"""A discrete-event simulation of what shares links and processors, and collectives as their messages."""
