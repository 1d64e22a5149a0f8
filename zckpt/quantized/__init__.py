"""Matrices of fp8 with scales: what a checkpoint says of them, what they stand for, and how they are made."""
