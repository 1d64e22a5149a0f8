"""What training a model will need: bytes of each GPU and of each node's host memory, before anything is started."""
