"""The octavo command, and `python -m octavo`: Ctrl-C while modules are imported ends it quietly."""

from __future__ import annotations


def main() -> int:
    """Import and run the command line; its exit code, 130 after Ctrl-C."""
    try:
        from .cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
