"""octavo bench throughput: a file of requests, all at once; one JSON object or a table."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EngineFault, OctavoError
from ..sampling_params import SamplingParams


class WorkloadError(OctavoError):
    """A workload file that can't be read."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of token ids with the number of tokens that each generates."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]


def read_workload(path: str) -> Workload:
    """{"requests": [{"prompt_ids": [...], "max_tokens": N}, ...]}. Raises WorkloadError."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise WorkloadError(f"can't read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} is no JSON: {error}") from None
    requests = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(requests, list) or not requests:
        raise WorkloadError(f'{path}: wanted {{"requests": [...]}} with at least one request')
    for number, request in enumerate(requests):
        if not _well_formed(request):
            raise WorkloadError(
                f"{path}: request {number} needs prompt_ids (a list of token ids) "
                "and max_tokens (at least 1)"
            )
    return Workload(
        name=str(content.get("name", Path(path).stem)),
        prompts=[request["prompt_ids"] for request in requests],
        max_tokens=[request["max_tokens"] for request in requests],
    )


def _well_formed(request: Any) -> bool:
    if not isinstance(request, dict):
        return False
    ids, limit = request.get("prompt_ids"), request.get("max_tokens")
    return (
        isinstance(ids, list)
        and bool(ids)
        and all(type(token_id) is int for token_id in ids)
        and type(limit) is int
        and limit >= 1
    )


def run(args: argparse.Namespace) -> int:
    """Load, run the workload once, print what it took."""
    workload = read_workload(args.workload)
    from .answer import load

    params = [
        SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        for limit in workload.max_tokens
    ]
    with closing(load(args)) as llm:
        before = llm.stats()
        start = time.perf_counter()
        outputs = llm.generate(workload.prompts, params, use_tqdm=sys.stderr.isatty())
        wall = time.perf_counter() - start
        after = llm.stats()
    failed = [output for output in outputs if output.outputs[0].finish_reason != "length"]
    if failed:
        reason = failed[0].outputs[0].finish_reason
        raise EngineFault(f"{len(failed)} of {len(outputs)} requests were not done ({reason})")
    prompt_tokens = sum(len(prompt) for prompt in workload.prompts)
    gen_tokens = sum(output.outputs[0].num_generated_tokens for output in outputs)
    report: dict[str, Any] = {
        "workload": workload.name,
        "model": llm.config.model,
        "num_requests": len(outputs),
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "gen_tok_s": round(gen_tokens / wall, 2),
        "total_tok_s": round((prompt_tokens + gen_tokens) / wall, 2),
        "wall_s": round(wall, 4),
        "load_s": round(llm.load_seconds, 4),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "steps": after.steps - before.steps,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "preemptions": after.num_preemptions - before.num_preemptions,
    }
    print(json.dumps(report) if args.json else table(report))
    return 0


def peak_rss_mb() -> float:
    """Most resident memory this process ever had, in MB of 2**20 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # macOS counts bytes


def table(report: dict[str, Any]) -> str:
    """Name and value a line, aligned."""
    width = max(len(name) for name in report)
    return "\n".join(f"{name:{width}}  {value}" for name, value in report.items())
