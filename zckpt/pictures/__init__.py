"""What a checkpoint looks like: a page for a browser and lines for a terminal."""
