"""zckpt's version, for all that write it into files."""

__version__ = "0.2.0"
