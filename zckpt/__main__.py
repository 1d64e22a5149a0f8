"""The command `zckpt`, also as `python -m zckpt`."""

from zckpt.base import collector


def main() -> None:
    """Runs the command line in a process of its own."""
    collector.switch_off()
    from zckpt.cli import main as run

    run()


if __name__ == "__main__":
    main()
