"""From the gradients of one rank to those of all: buckets, fusion buffers, hooks and the reducer."""
