"""Muon for the matrices of a model, and AdamW for the rest."""
