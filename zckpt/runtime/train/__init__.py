"""What `zckpt train` does on every rank: the processes, the model, the data, the loop and its metrics."""
