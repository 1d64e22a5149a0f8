"""The command `zckpt`, also as `python -m zckpt`."""

import sys

from zckpt.base import collector


def main() -> None:
    """Runs the command line in a process of its own."""
    collector.switch_off()
    if "--deep" in sys.argv:
        from zckpt.engine.early import begin

        begin(sys.argv[1:])
    from zckpt.cli import main as run

    run()


if __name__ == "__main__":
    main()
