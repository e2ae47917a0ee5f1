"""Small faults put into a copy of the package, and the checks that find them: `./scripts/mutate`."""
