"""Saves of rows, for zckpt: `layout` and `second`, names of tensors in `rows.json`, a form of quantised weights in `steps`."""
