"""Estimates what training a model needs: bytes of each GPU and of each node's host memory, before anything is started."""
