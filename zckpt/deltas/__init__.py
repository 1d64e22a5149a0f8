"""Deltas: a new version of weights as what has changed in the bytes of an older one.

For `jobs.delta`, `jobs.apply_delta` and `live.delta`. The form is the one that SGLang's weight pull reads (`form`).
"""
