"""Plain weights: safetensors and torch files, single or in shards with an index."""
