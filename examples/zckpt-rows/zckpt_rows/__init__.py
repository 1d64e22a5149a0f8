"""Saves of rows, for zckpt: `layout` and `second`, and the names of their tensors in `rows.json`."""
