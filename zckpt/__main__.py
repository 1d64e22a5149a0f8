"""`python -m zckpt` is `zckpt`."""

from zckpt.cli import main

if __name__ == "__main__":
    main()
