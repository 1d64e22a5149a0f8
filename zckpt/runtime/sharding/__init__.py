"""Shards the model: which rank holds what of each parameter, how parts and gradients move, and what watches over it."""
