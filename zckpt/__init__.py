"""zckpt: consolidated weights out of sharded training checkpoints."""
