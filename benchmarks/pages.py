"""What huge pages give: decoding one stream and many, with weights on each kind of memory.

    python benchmarks/pages.py [--model MODEL] [--repeats 5] [--quantization int8]

One engine for each kind of memory, in one process; they take turns, so that a busy neighbour slows
all alike. Best generated tokens/s of each, and of one stream the rate at which weights were read.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from octavo import LLM, SamplingParams

KINDS: dict[str, dict[str, object]] = {
    "packed, huge pages": {"packed_cache": "off"},
    "packed, 4 KiB pages": {"packed_cache": "off", "huge_pages": False},
    "file, mapped": {"packed_cache": "map"},
    "file, copied": {"packed_cache": "copy"},
}
ROWS = {1: 32, 64: 8}
"""Streams, and the tokens that each generates after the first."""


def seconds(llm: LLM, streams: int, num_tokens: int) -> float:
    """Of decoding alone: a run of num_tokens more less a run of one."""
    prompts = [[5 + i, 6, 7, 8] for i in range(streams)]
    times = []
    for count in (1, 1 + num_tokens):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return times[1] - times[0]


def mapped_huge_mib() -> int:
    """MiB of mapped files that lie on huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(x.split()[1]) for x in text.splitlines() if x.startswith("FilePmdMapped")) >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization", choices=("int8", "stored"), help="else bfloat16")
    args = parser.parse_args()
    common = {"num_kv_blocks": 256, "max_model_len": 512}
    common |= {"quantization": args.quantization} if args.quantization else {"dtype": "bfloat16"}
    LLM(args.model, **common).close()  # fills the cache
    from octavo.kernels.cpu import packed

    packed.wait()
    engines, huge, nbytes = {}, 0, 0
    for name, settings in KINDS.items():
        engines[name] = llm = LLM(args.model, **common, **settings)
        report = llm._engine.core.executor.describe()
        nbytes = int(report["weights"].split()[0].replace(",", "")) << 20
        huge, before = mapped_huge_mib(), huge
        if "mapped" in name:
            print(f"{name}: {huge - before:,} MiB of the mapping on huge pages")
    best = {(name, rows): float("inf") for name in engines for rows in ROWS}
    for _ in range(args.repeats + 1):
        for name, llm in engines.items():
            for rows, count in ROWS.items():
                best[name, rows] = min(best[name, rows], seconds(llm, rows, count))
    print(f"{args.model}, {args.quantization or 'bf16'}: generated tokens/s")
    print(f"{'':28}" + "".join(f"{rows:4} streams" for rows in ROWS) + "    GB/s of one")
    for name in engines:
        rates = [rows * count / best[name, rows] for rows, count in ROWS.items()]
        columns = "".join(f"{rate:12.1f}" for rate in rates)
        print(f"{name:28}{columns}{nbytes * rates[0] / 1e9:15.1f}")


if __name__ == "__main__":
    main()
