"""The fuzzer: random training programs on several ranks, each compared with what one process computes."""
