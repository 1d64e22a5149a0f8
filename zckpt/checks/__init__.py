"""May a checkpoint or an output be trusted: complete, intact, equal, fit to resume from."""
