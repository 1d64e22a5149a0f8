"""Saving and loading a run, in DeepSpeed's files. docs/training.md says what users can rely on."""
