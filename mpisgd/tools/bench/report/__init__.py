"""What was measured, for people: rows, tables for a terminal, plots."""
