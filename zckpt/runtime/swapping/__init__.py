"""Keeps parts of a run in files: fp32 weights, optimizer states, and at stage 3 the parameters (ZeRO-Infinity)."""
