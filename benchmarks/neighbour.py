"""What a busy neighbour costs: decode with all threads, alone and beside one that spins on a core.

    python benchmarks/neighbour.py [--requests 16] [--tokens 48] [--repeats 3] [--kind process]

The same requests run alone and beside the neighbour in turns, each from the same prompts. With N
cores and one of them shared in halves, N - 1/2 cores' worth of work is left: the fair floor.
kind process: another process, pinned to one core. kind thread: a thread of this process in a loop
of Python, as a server's event loop at its busiest; it wants the interpreter lock, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from octavo.engine.llm import LLM
from octavo.kernels.cpu import available_cpus
from octavo.sampling_params import SamplingParams

SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def busy_process(cpu: int) -> Iterator[None]:
    """A process that spins on `cpu`."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)])
    time.sleep(0.2)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy_thread(cpu: int) -> Iterator[None]:
    """A thread of this process that spins in Python, wherever it is put."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


NEIGHBOURS: dict[str, Callable[[int], object]] = {"process": busy_process, "thread": busy_thread}


def generate(llm: LLM, requests: int, tokens: int) -> float:
    """Generated tokens a second."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(1000 + i, 1032 + i))} for i in range(requests)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=sorted(NEIGHBOURS), default="process")
    args = parser.parse_args()
    llm = LLM(args.model, enable_prefix_caching=False)
    generate(llm, args.requests, args.tokens)
    cpus = sorted(os.sched_getaffinity(0))
    alone, beside = [], []
    for turn in range(args.repeats):
        alone.append(generate(llm, args.requests, args.tokens))
        with NEIGHBOURS[args.kind](cpus[turn % len(cpus)]):  # type: ignore[attr-defined]
            beside.append(generate(llm, args.requests, args.tokens))
        print(f"alone {alone[-1]:.0f} tok/s, beside {beside[-1]:.0f}: {beside[-1] / alone[-1]:.0%}")
    floor = 1 - 0.5 / available_cpus()
    ratio = median(beside) / median(alone)
    print(f"median: {ratio:.0%} of alone; fair floor {floor:.0%}")


if __name__ == "__main__":
    main()
