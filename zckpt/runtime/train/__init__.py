"""The parts of `zckpt train` on every rank: the processes, the model, the data, the loop and its metrics."""
