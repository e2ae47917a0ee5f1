"""Stochastic gradient push."""
