"""Draws a checkpoint: a page for a browser, and lines for a terminal."""
