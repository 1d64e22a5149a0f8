"""Carries a plan out: moves, casts, checksums, scans. The C++ engine, and the slow Python one it must equal."""
