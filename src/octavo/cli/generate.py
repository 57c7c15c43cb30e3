"""octavo generate: continue a text; only the text on stdout, statistics on stderr."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from .answer import load, params_of, read_prompt, stream_answer


def run(args: argparse.Namespace) -> int:
    """Load, continue the prompt, report."""
    prompt = read_prompt(args.prompt)
    pieces: list[str] = []
    with closing(load(args)) as llm:
        prompt_ids = llm.tokenizer.encode(prompt)
        params = params_of(llm, args, len(prompt_ids))
        timing = stream_answer(llm, prompt_ids, params, pieces)
    if sys.stdout.isatty() and not "".join(pieces).endswith("\n"):
        print()  # for a person; a file or a pipe gets the exact text
    print(f"{timing} | load: {llm.load_seconds:.2f} s", file=sys.stderr)
    return 0
