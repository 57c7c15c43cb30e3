"""`python -m octavo` is the octavo command."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
