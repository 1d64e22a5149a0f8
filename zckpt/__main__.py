"""The command `zckpt`, also as `python -m zckpt`."""

import atexit
import gc


def main() -> None:
    """Runs the command line in a process of its own."""
    gc.disable()  # modules and plans are millions of objects in no cycle: looking for one takes a tenth of the time
    atexit.register(gc.freeze)  # nor does Python look for one at its end, where that would take a tenth again
    from zckpt.cli import main as run

    run()


if __name__ == "__main__":
    main()
