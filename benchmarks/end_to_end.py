"""Whole runs of the engine against the floor of this machine, measured in the same process.

    python benchmarks/end_to_end.py [--model M] [--forms bf16,int8] [--loads mixed,one]

Loads, greedy, of random ids, new ones in each repeat so that no prefix is met by chance:

mixed      64 requests at once, prompts of 16 to 512 tokens, outputs of 16 to 512
shared     48 requests at once with 1,000 tokens in common and 30 to 80 of their own, 32 out
alone      the same without a prefix cache
one        one stream: a prompt of 128 tokens, 128 out; tok/s of the tokens after the first
prefill    one prompt of 512 tokens, one out; prompt tok/s
long       one prompt of 4,096 tokens, one out; prompt tok/s

The floor is that of a machine which wastes nothing: prompts at the peak rate of products in the
caches, then one step a token, each max(FLOPs / peak, bytes of weights and K/V / bandwidth). Peak
and bandwidth are those of `machine.measure`, for bfloat16, whatever the weights are kept in; so
a form that needs fewer operations may pass it. Best of the repeats, as neighbours only take away.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from machine import Speed, measure

from octavo.checkpoint import ModelConfig
from octavo.engine.llm import LLM
from octavo.kernels.cpu import CpuKernels, available_cpus, make_kernels
from octavo.sampling_params import SamplingParams
from octavo.weights.sources import open_checkpoint

ORDINARY_IDS = range(1000, 40000)
KV_BYTES = 2
SHARED = 1000
FORMS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "stored": {"quantization": "stored"},
}
"""How the weights are kept: settings, by name."""


class Asked(NamedTuple):
    """One request."""

    prompt: list[int]
    max_tokens: int


class Load(NamedTuple):
    """What one repeat sends, and which of its tokens and seconds count."""

    requests: list[Asked]
    counts: str
    """output: all of them; later: those after the first; prompt: the prompt's."""
    caching: bool = True
    shared: int = 0


def make_load(name: str, seed: int) -> Load:
    """The requests of one repeat; another seed is another text."""
    draw = random.Random(f"{name} {seed}")  # no load begins as another

    def ids(length: int) -> list[int]:
        return draw.choices(ORDINARY_IDS, k=length)

    if name in ("shared", "alone"):
        common = ids(SHARED)
        asked = [Asked(common + ids(draw.randint(30, 80)), 32) for _ in range(48)]
        return Load(asked, "output", name == "shared", SHARED if name == "shared" else 0)
    if name != "mixed":
        length, out = {"one": (128, 128), "prefill": (512, 1), "long": (4096, 1)}[name]
        return Load([Asked(ids(length), out)], "later" if name == "one" else "prompt")
    asked = []
    for _ in range(64):
        length = min(512, max(16, round(draw.lognormvariate(4.87, 0.75))))
        low, high = draw.choices([(16, 100), (100, 256), (256, 512)], [40, 40, 20])[0]
        asked.append(Asked(ids(length), draw.randint(low, high)))
    return Load(asked, "output")


class Costs(NamedTuple):
    """Operations and bytes of a model, per token and per step."""

    layers: int
    """Weights of the decoder layers."""
    head: int
    per_key: int
    """Attention's FLOPs of one query for one key, all layers and heads."""
    kv_bytes: int
    """Bytes of K and V of one token, all layers."""
    weight_bytes: int


def costs_of(config: ModelConfig, weight_bytes: int) -> Costs:
    dim, hidden, depth = config.head_dim, config.hidden_size, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
    return Costs(
        layers=depth * layer,
        head=hidden * config.vocab_size,
        per_key=4 * depth * heads * dim,
        kv_bytes=2 * depth * kv_heads * dim * KV_BYTES,
        weight_bytes=weight_bytes,
    )


def prompt_floor(load: Load, cost: Costs, speed: Speed) -> float:
    """Seconds for all prompts; what is shared is computed once."""
    seconds = 0.0
    for i, asked in enumerate(load.requests):
        start = load.shared if i else 0
        length = len(asked.prompt)
        keys = sum(range(start + 1, length + 1))
        flops = 2 * cost.layers * (length - start) + 2 * cost.head + cost.per_key * keys
        seconds += flops / speed.flops
    return max(seconds, cost.weight_bytes / speed.bytes)


def decode_floor(load: Load, cost: Costs, speed: Speed) -> float:
    """Seconds for all tokens after the first, a step each for all requests that still run."""
    seconds = 0.0
    for step in range(1, max(asked.max_tokens for asked in load.requests)):
        keys = [len(a.prompt) + step for a in load.requests if a.max_tokens > step]
        flops = 2 * (cost.layers + cost.head) * len(keys) + cost.per_key * sum(keys)
        seconds += speed.floor(flops, cost.weight_bytes + cost.kv_bytes * sum(keys))
    return seconds


def floor_rate(load: Load, cost: Costs, speed: Speed) -> float:
    """Tokens/s, counted as `rate` counts them."""
    prompt, decode = prompt_floor(load, cost, speed), decode_floor(load, cost, speed)
    if load.counts == "prompt":
        return len(load.requests[0].prompt) / prompt
    if load.counts == "later":
        return (load.requests[0].max_tokens - 1) / decode
    return sum(asked.max_tokens for asked in load.requests) / (prompt + decode)


def rate(llm: LLM, load: Load) -> float:
    """Tokens/s of one run."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        for asked in load.requests
    ]
    if load.counts == "output":
        start = time.perf_counter()
        outputs = llm.generate([a.prompt for a in load.requests], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(output.outputs[0].num_generated_tokens for output in outputs)
        assert made == sum(asked.max_tokens for asked in load.requests)
        return made / seconds
    start = time.perf_counter()
    times = [time.perf_counter() for _ in llm.stream(load.requests[0].prompt, params[0])]
    if load.counts == "prompt":
        return len(load.requests[0].prompt) / (times[0] - start)
    return (load.requests[0].max_tokens - 1) / (times[-1] - times[0])


def measured(
    model: str, form: str, names: Sequence[str], repeats: int
) -> Iterator[tuple[str, Load, float, int]]:
    """Each load's name, requests, best tok/s, and the bytes of the weights."""
    for caching in (True, False):
        todo = [name for name in names if make_load(name, 0).caching is caching]
        if not todo:
            continue
        llm = LLM(model, enable_prefix_caching=caching, **FORMS[form])
        report = llm._engine.core.executor.describe()
        weight_bytes = int(report["weights"].split()[0].replace(",", "")) << 20
        for name in todo:
            rates = [rate(llm, make_load(name, seed)) for seed in range(repeats)]
            yield name, make_load(name, 0), max(rates), weight_bytes
        llm.close()


def show(ops: CpuKernels, args: argparse.Namespace, form: str) -> None:
    config = open_checkpoint(args.model, progress=False).config
    before = measure(ops)
    rows = list(measured(args.model, form, args.loads.split(","), args.repeats))
    after = measure(ops)
    speed = Speed(max(before.flops, after.flops), max(before.bytes, after.bytes))
    print(f"\n{args.model}, {form}, weights {rows[0][3] / 1e6:,.0f} MB; peak "
          f"{speed.flops / 1e9:,.0f} GFLOP/s, bandwidth {speed.bytes / 1e9:.1f} GB/s")  # fmt: skip
    print(f"  {'load':>8} {'floor tok/s':>12} {'tok/s':>9} {'of floor':>9}")
    for name, load, best, weight_bytes in rows:
        floor = floor_rate(load, costs_of(config, weight_bytes), speed)
        print(f"  {name:>8} {floor:>12,.0f} {best:>9,.1f} {best / floor:>9.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--loads", default="mixed,shared,alone,one,prefill,long")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    ops = make_kernels(threads=available_cpus(), dtype="bfloat16")
    for form in args.forms.split(","):
        show(ops, args, form)


if __name__ == "__main__":
    main()
