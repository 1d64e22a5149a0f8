"""Equality of tensors to the last bit, for every test that needs it."""

from __future__ import annotations

import torch


def same_bits(a: object, b: object) -> bool:
    """Whether dtype, shape and every bit agree; NaNs are bits like others."""
    a, b = (torch.as_tensor(x).detach() for x in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    # A copy into new memory: a single element keeps whatever stride it had, and a view as bytes refuses that.
    a, b = (x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)
