"""Every element of a gradient travels, in a few bits, rounded at random without bias."""
