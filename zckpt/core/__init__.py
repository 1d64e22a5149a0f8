"""Tensors, where their elements live, and what goes where: pure values. No file is opened here."""
