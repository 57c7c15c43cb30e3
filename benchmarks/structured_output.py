"""Structured output over the real vocabulary: does it keep its schemas, and what does it cost?

    python benchmarks/structured_output.py [--samples 100] [--every 1] [--model smollm2-135m]

Random logits that favour tokens that close something drive the matchers of 200 schemas and more;
each output that comes to an end within 600 tokens is validated by jsonschema. Prints the share
that ends (at least 95 % must), and the times of compiling and of making one mask. Fails if an
output breaks its schema.

    python benchmarks/structured_output.py --saving [--model smollm2-135m]

What jump-forward saves: the same answers of the model itself, compact JSON for 1 and for 16 at a
time, with and without it, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from beds.schemas import all_schemas
from octavo import LLM, SamplingParams
from octavo.engine.grammar import GrammarFault, Grammars, Matcher
from octavo.engine.tokenizer import Tokenizer
from octavo.grammar_spec import GrammarSpec
from octavo.weights.sources import open_checkpoint

MAX_TOKENS = 600
CLOSING = (b'"', b"}", b"]", b",")
CLOSING_WEIGHT = np.exp(7.0)
MIN_SHARE = 0.95


class Run:
    """Counts and times of one run."""

    def __init__(self, model: str) -> None:
        checkpoint = open_checkpoint(model)
        self.tokenizer = Tokenizer(checkpoint.tokenizer)
        size = self.tokenizer.vocab_size
        self.eos_token_ids = checkpoint.generation.eos_token_ids
        self.grammars = Grammars(self.tokenizer, vocab_size=size, eos_token_ids=self.eos_token_ids)
        self.closes = np.array(
            [
                i in self.eos_token_ids or self.tokenizer.token_bytes(i)[:1] in CLOSING
                for i in range(size)
            ]
        )
        self.compile_times: list[float] = []
        self.mask_times: list[float] = []
        self.num_started = self.num_finished = 0

    def one(self, spec: GrammarSpec, seed: int) -> str | None:
        """One output, or None if it did not come to an end."""
        draw = np.random.default_rng(seed)
        matcher = Matcher(self.grammars.compile(spec))
        token_ids: list[int] = []
        self.num_started += 1
        while len(token_ids) < MAX_TOKENS:
            token_id = self.choose(matcher.mask, draw)
            if token_id in self.eos_token_ids:
                break
            token_ids.append(token_id)
            start = time.perf_counter()
            _, done = matcher.advance([token_id])
            self.mask_times.append(time.perf_counter() - start)
            if done:
                break
        else:
            return None
        self.num_finished += 1
        return self.tokenizer.decode(token_ids)

    def choose(self, mask: bytes, draw: np.random.Generator) -> int:
        """A softmax draw where logits have two values: first which value, then which token."""
        packed = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(packed, count=self.closes.size, bitorder="little").view(np.bool_)
        closing = np.flatnonzero(allowed & self.closes)
        others = np.flatnonzero(allowed & ~self.closes)
        weight = closing.size * CLOSING_WEIGHT
        ids = closing if draw.random() * (weight + others.size) < weight else others
        return int(ids[draw.integers(ids.size)])


def quantiles(times: list[float]) -> str:
    p50, p99 = np.quantile(times, [0.5, 0.99]) * 1000
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {max(times) * 1000:.1f} ms"


TICKET = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "delivery", "technical", "other"]},
        "priority": {"enum": ["low", "medium", "high"]},
        "needs_human": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 60},
    },
    "required": ["category", "priority", "needs_human", "summary"],
    "additionalProperties": False,
}
COMPLAINT = "Classify this message as JSON: My parcel number {} came three days late and open."


def show_saving(model: str) -> int:
    """Steps and seconds per run, with and without jumps; fails if an answer differs."""
    engines = {
        jumps: LLM(model, max_model_len=512, num_kv_blocks=600, jump_forward=jumps)
        for jumps in (False, True)
    }
    params = SamplingParams(grammar=GrammarSpec.json(TICKET), seed=1, max_tokens=200)
    for count in (1, 16):
        chats = [[{"role": "user", "content": COMPLAINT.format(i)}] for i in range(count)]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        steps, texts, num_tokens = {}, {}, 0
        for turn in range(6):
            jumps = bool(turn % 2)
            llm = engines[jumps]
            before, start = llm.stats().steps, time.perf_counter()
            outputs = llm.chat(chats, params, use_tqdm=False)
            seconds[jumps].append(time.perf_counter() - start)
            steps[jumps] = llm.stats().steps - before
            texts[jumps] = [output.outputs[0].text for output in outputs]
            num_tokens = sum(output.outputs[0].num_generated_tokens for output in outputs)
        if texts[False] != texts[True]:
            print("answers differ")
            return 1
        slow, fast = min(seconds[False]), min(seconds[True])
        print(f"{count} at a time, {num_tokens} tokens: {steps[False]} to {steps[True]} steps,")
        print(f"    {slow * 1000:.0f} to {fast * 1000:.0f} ms, {slow / fast:.2f} times as fast")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=100, help="outputs for each schema")
    parser.add_argument("--every", type=int, default=1, help="take one schema in so many")
    parser.add_argument("--saving", action="store_true", help="what jump-forward saves")
    args = parser.parse_args()
    if args.saving:
        return show_saving(args.model)
    run = Run(args.model)
    start = time.perf_counter()
    run.grammars.compile(GrammarSpec.regex("a"))
    print(f"vocabulary: {(time.perf_counter() - start) * 1000:.0f} ms, once")
    # Dates keep their form, not the calendar: 29 February may stand in any year.
    checker = jsonschema.FormatChecker({"uuid", "ipv4"})
    schemas = all_schemas()[:: args.every]
    for schema in schemas:
        spec = GrammarSpec.json(schema)
        start = time.perf_counter()
        run.grammars.compile(spec)
        run.compile_times.append(time.perf_counter() - start)
        for seed in range(args.samples):
            try:
                text = run.one(spec, seed)
            except GrammarFault as fault:
                print(f"{fault}: {schema}")
                continue
            if text is not None:
                jsonschema.validate(json.loads(text), schema, format_checker=checker)
    share = run.num_finished / run.num_started
    print(f"schemas: {len(schemas)}, outputs: {run.num_started}, ended and valid: {share:.1%}")
    print(f"compile: {quantiles(run.compile_times)}")
    print(f"mask:    {quantiles(run.mask_times)} ({len(run.mask_times)} tokens)")
    return 0 if share >= MIN_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
