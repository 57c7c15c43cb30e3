"""Whole answers of a real engine, bit for bit: many at once under pressure, or each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from beds.backends import backend_settings
from beds.tiny_files import VOCAB_SIZE
from octavo import LLM, SamplingParams
from octavo.engine.input_processor import derive_seed
from octavo.outputs import CompletionOutput, RequestOutput

Bits = tuple[Any, ...]


def prompt(length: int, start: int = 0) -> list[int]:
    """Token ids that no other `start` begins with."""
    return [3 + (7 * i + 13 * start) % (VOCAB_SIZE - 3) for i in range(length)]


def bits(answer: CompletionOutput) -> Bits:
    """All that a client can see of an answer."""
    logprobs = [
        (x.token_id, x.logprob, x.rank, tuple((y.token_id, y.logprob) for y in x.top))
        for x in answer.logprobs or ()
    ]
    return answer.token_ids, answer.text, answer.finish_reason, logprobs


def roomy(model: str, backend: str) -> LLM:
    """An engine with room for everything and no cache: nobody disturbs anybody."""
    return LLM(
        model,
        max_model_len=128,
        num_kv_blocks=64,
        enable_prefix_caching=False,
        **backend_settings(backend),
    )


def alone(llm: LLM, token_ids: list[int], params: SamplingParams) -> list[Bits]:
    """The n answers to a prompt, each as a request of its own."""
    answers = []
    for index in range(params.n):
        assert params.seed is not None
        seed = params.seed if index == 0 else derive_seed(params.seed, index)
        one = replace(params, n=1, seed=seed)
        answers.append(bits(llm.generate([token_ids], one, use_tqdm=False)[0].outputs[0]))
    return answers


@dataclass(frozen=True)
class Job:
    """A request, and when and as whose it comes."""

    token_ids: list[int]
    params: SamplingParams
    arrival_step: int = 0
    priority: int = 0
    scope: str = ""
    tenant: str = ""


def serve(
    llm: LLM, jobs: list[Job], meanwhile: Callable[[int], object] = lambda step: None
) -> list[RequestOutput]:
    """Run all jobs to their ends, each from its step on; audited after every step."""
    core = llm._engine.core
    queue = sorted(enumerate(jobs), key=lambda job: job[1].arrival_step)
    outputs: dict[int, RequestOutput] = {}
    of_job: dict[int, RequestOutput] = {}
    for step in range(100_000):
        while queue and queue[0][1].arrival_step <= step:
            number, job = queue.pop(0)
            _, requests = llm._prepare(job.token_ids, job.params)
            for request in requests:
                request.priority, request.tenant = job.priority, job.tenant
                request.cache_scope = job.scope
            core.add(requests)
            answers = [CompletionOutput(index) for index in range(job.params.n)]
            request_id = requests[0].request_id
            of_job[number] = RequestOutput(request_id, None, job.token_ids, answers)
            outputs[request_id] = of_job[number]
        if not queue and not core.has_unfinished():
            return [of_job[number] for number in range(len(jobs))]
        for event in core.step():
            outputs[event.request_id].add(event)
        core.scheduler.audit()
        meanwhile(step)
    raise AssertionError("not done")
