"""Checks whether a checkpoint or an output can be trusted: complete, intact, equal, fit to resume from."""
