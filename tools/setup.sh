#!/bin/sh
# Find a Python that is new enough and hand over to setup.py, with all arguments.
# Set PYTHON to choose one, which is then the one or none; otherwise the one of .venv, python3, or the newest python3.x on PATH.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if [ -n "$PYTHON" ]; then
    if (exec "$PYTHON" -c "$new_enough") 2>/dev/null; then
        exec "$PYTHON" "$root/tools/setup.py" "$@"
    fi
    echo "setup: PYTHON=$PYTHON is no Python 3.11 or newer that runs: correct it, or leave it out" >&2
    exit 1
fi
for candidate in "$root/.venv/bin/python" \
    python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$new_enough" 2>/dev/null; then
        exec "$candidate" "$root/tools/setup.py" "$@"
    fi
done
found=$(python3 --version 2>/dev/null || echo "no python3")
echo "setup: Octavo needs Python 3.11 or newer, found $found:" \
    "install one, or run 'make PYTHON=/path/to/python3.11 ...'" >&2
exit 1
