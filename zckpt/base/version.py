"""zckpt's version and addresses, for all that print them or write them into files."""

__version__ = "0.2.0"

REPOSITORY = "https://github.com/zckpt/zckpt"
DOCUMENTATION = "https://zckpt.github.io/zckpt/"
