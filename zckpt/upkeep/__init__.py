"""Manages the saves in a run's directory: what they take, and which may go."""
