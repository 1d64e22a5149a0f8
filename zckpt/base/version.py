"""zckpt's version, for all that write it into files."""

__version__ = "0.1.0"
