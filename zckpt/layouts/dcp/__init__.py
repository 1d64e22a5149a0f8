"""torch.distributed.checkpoint directories, read and written."""
