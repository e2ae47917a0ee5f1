"""Ranks that push gradients and fetch parameters, each at its own pace."""
