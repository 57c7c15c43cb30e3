"""Same request, same answer, bit for bit: whatever else runs, however the work is cut.

Each law compares a disturbed engine with the undisturbed one (each request alone, whole prompt in
one step, a large pool, no prefix cache) and also checks that the disturbance took place. Ids, text
and logprobs must be equal, not close. Greedy and sampled requests are mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beds.backends import LAW_BACKENDS, backend_settings, cpu_levels
from beds.tiny_files import VOCAB_SIZE, write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

Workload = list[tuple[list[int], SamplingParams]]
ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
TOKEN_IDS = st.integers(3, VOCAB_SIZE - 1)
MODES = st.sampled_from(["raw", "processed"])


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """Everything that a caller may see of an answer."""
    answer = output.outputs[0]
    logprobs = [
        x and (x.token_id, x.logprob, x.rank, tuple((y.token_id, y.logprob) for y in x.top))
        for x in (*(answer.logprobs or ()), *(output.prompt_logprobs or ()))
    ]
    return answer.token_ids, answer.text, answer.finish_reason, logprobs


def run(llm: LLM, workload: Workload) -> list[tuple[Any, ...]]:
    prompts = [prompt for prompt, _ in workload]
    return [bits(x) for x in llm.generate(prompts, [p for _, p in workload], use_tqdm=False)]


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    prompt_logprobs = draw(st.sampled_from([None, None, 0, 3]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 20])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=draw(st.integers(1, 24)),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        prompt_logprobs=prompt_logprobs,
        logprobs_mode="raw" if prompt_logprobs is not None else draw(MODES),
        logprob_token_ids=draw(st.lists(TOKEN_IDS, max_size=2)),
        bad_words_token_ids=draw(
            st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=2).map(tuple), max_size=9)
        ),
        ignore_eos=True,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """2 to 7 requests, some of which share a prefix."""
    prefix = draw(st.lists(TOKEN_IDS, min_size=0, max_size=20))
    number = draw(st.integers(2, 7))
    return [
        (
            (prefix if draw(st.booleans()) else [])
            + draw(st.lists(TOKEN_IDS, min_size=1, max_size=40)),
            draw(sampling_params()),
        )
        for _ in range(number)
    ]


class Engines:
    """Engines over one tiny model, by settings, made once each."""

    def __init__(self, model: str, backend: str, **fixed: Any) -> None:
        self.model = model
        self.fixed = {**backend_settings(backend), **fixed}
        self.made: dict[str, LLM] = {}

    def __call__(self, **settings: Any) -> LLM:
        key = repr(sorted(settings.items()))
        if key not in self.made:
            self.made[key] = LLM(self.model, max_model_len=128, **self.fixed, **settings)
        return self.made[key]

    def close(self) -> None:
        for llm in self.made.values():
            llm.close()

    def alone(self, workload: Workload) -> list[tuple[Any, ...]]:
        """The undisturbed answers: each request by itself in a roomy engine."""
        llm = self(num_kv_blocks=64, block_size=16, **ROOMY)
        return [run(llm, [request])[0] for request in workload]


@pytest.fixture(scope="module", params=LAW_BACKENDS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder: Path = tmp_path_factory.mktemp("laws")
    made = Engines(str(write_tiny_gguf(folder / "tiny.gguf")), request.param)
    yield made
    made.close()


@given(workload=workloads())
@settings(max_examples=20)
def test_batched_is_alone(engines: Engines, workload: Workload) -> None:
    """R44: neighbours never change an answer."""
    assert run(engines(num_kv_blocks=64, block_size=16, **ROOMY), workload) == engines.alone(
        workload
    )


@given(workload=workloads(), budget=st.sampled_from([1, 3, 7, 16, 33]))
@settings(max_examples=20)
def test_any_chunk_size_is_whole(engines: Engines, workload: Workload, budget: int) -> None:
    """R111: a prompt cut into chunks anywhere gives what the whole prompt gives."""
    chunked = engines(
        num_kv_blocks=64, block_size=16, **{**ROOMY, "max_num_batched_tokens": budget}
    )
    assert run(chunked, workload) == engines.alone(workload)


@given(workload=workloads(), block_size=st.sampled_from([1, 2, 8, 32]))
@settings(max_examples=12)
def test_any_block_size_is_the_same(engines: Engines, workload: Workload, block_size: int) -> None:
    """The block size is a matter of memory, never of the answer."""
    other = engines(num_kv_blocks=512 // block_size, block_size=block_size, **ROOMY)
    assert run(other, workload) == engines.alone(workload)


@given(workload=workloads())
@settings(max_examples=15)
def test_prefix_hit_is_fresh(engines: Engines, workload: Workload) -> None:
    """R114, C4, C43: K/V found in the cache are the bits that a fresh prefill computes."""
    llm = engines(num_kv_blocks=256, block_size=4, **{**ROOMY, "enable_prefix_caching": True})
    first = run(llm, workload)
    hits_before = llm.stats().prefix_hits_tokens
    again = run(llm, workload)
    assert first == again == engines.alone(workload)
    # Who wants prompt logprobs reuses nothing.
    lengths = (len(prompt) for prompt, params in workload if params.prompt_logprobs is None)
    longest = max(lengths, default=0)
    assert longest <= 4 or llm.stats().prefix_hits_tokens > hits_before


@given(workload=workloads(), order=st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_order_of_arrival_is_no_matter(engines: Engines, workload: Workload, order: Any) -> None:
    """Each seeded request answers the same, wherever it stands in the queue."""
    places = list(range(len(workload)))
    order.shuffle(places)
    llm = engines(num_kv_blocks=64, block_size=16, **ROOMY)
    shuffled = run(llm, [workload[place] for place in places])
    expected = engines.alone(workload)
    assert shuffled == [expected[place] for place in places]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_is_undisturbed(engines: Engines, prefix_caching: bool) -> None:
    """R99, C14: recomputed after preemption, with chunks, in a pool that is far too small; what was
    generated before counts for the presence penalty as output, not as prompt."""
    assert_preempted_is_undisturbed(engines, enable_prefix_caching=prefix_caching)


def assert_preempted_is_undisturbed(engines: Engines, **settings: Any) -> None:
    workload: Workload = [
        (
            [3 + (7 * i + 5 * j) % (VOCAB_SIZE - 3) for j in range(11 + i)],
            SamplingParams(
                temperature=0.8 * (i % 2),
                presence_penalty=1.5 * (i % 3 != 0),
                seed=i,
                max_tokens=40,
                logprobs=3,
                ignore_eos=True,
            ),
        )
        for i in range(6)
    ]
    llm = engines(
        num_kv_blocks=33,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=9,
        **settings,
    )
    before = llm.stats().num_preemptions
    assert run(llm, workload) == engines.alone(workload)
    assert llm.stats().num_preemptions > before, "the pool was large enough: nothing was tested"


@pytest.mark.parametrize("level", cpu_levels())
def test_every_level_of_the_machine_keeps_the_laws(level: str, tmp_path: Path) -> None:
    """Batches, chunks, preemption and prefix hits together, on each instruction-set level."""
    engines = Engines(str(write_tiny_gguf(tmp_path / "tiny.gguf")), "cpu", isa=level)
    assert_preempted_is_undisturbed(engines)
    assert_preempted_is_undisturbed(engines)
    (pressed,) = [llm for llm in engines.made.values() if llm.stats().num_preemptions]
    assert pressed.stats().prefix_hits_tokens > 0
    engines.close()


def test_unseeded_requests_repeat_from_the_engine_seed(tmp_path: Path) -> None:
    """--seed derives the seeds of requests without one from their arrival number."""
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7]] * 3

    def answers(seed: int) -> list[list[int]]:
        llm = LLM(model, max_model_len=64, num_kv_blocks=16, seed=seed)
        return [x.outputs[0].token_ids for x in llm.generate(prompts, params, use_tqdm=False)]

    first = answers(1)
    assert first == answers(1)
    assert first != answers(2)
    assert len({tuple(ids) for ids in first}) == 3, "equal prompts must not share their noise"


def test_threads_are_no_matter(tmp_path: Path) -> None:
    """1 thread = 2 threads = 3, on the backend that has threads of its own."""
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=5, ignore_eos=True)
    prompts = [[3 + (11 * i + j) % (VOCAB_SIZE - 3) for j in range(5 + 9 * i)] for i in range(5)]

    def answers(threads: int) -> list[tuple[Any, ...]]:
        llm = LLM(model, backend="cpu", max_model_len=128, num_kv_blocks=64, threads=threads)
        return run(llm, [(prompt, params) for prompt in prompts])

    assert answers(1) == answers(2) == answers(3)


SMALL_POOL: dict[str, Any] = {"num_kv_blocks": 34, "block_size": 4, "max_num_batched_tokens": 17}
CACHED = {**SMALL_POOL, "enable_prefix_caching": True}
HARD = {
    "priority, static": {**CACHED, "scheduling_policy": "priority", "batching_mode": "static"},
    "longest prefix, most generated": {
        **CACHED,
        "scheduling_policy": "longest_prefix",
        "victim_policy": "most_generated",
        "overtake_limit": 1,
    },
    "fair share, fewest generated, skips": {
        **CACHED,
        "scheduling_policy": "fair_share",
        "victim_policy": "fewest_generated",
        "skip_limit": 3,
    },
    "static with padding, two rows": {**CACHED, "batching_mode": "static", "max_num_seqs": 2},
    "static without padding, no cache": {
        **SMALL_POOL,
        "batching_mode": "static_dropped",
        "enable_prefix_caching": False,
    },
    "whole prompts, priority that ages": {
        **CACHED,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": False,
        "scheduling_policy": "priority",
        "priority_ageing_steps": 2,
    },
    "contiguous": {
        **SMALL_POOL,
        "num_kv_blocks": 70,
        "kv_reservation": "contiguous",
        "enable_prefix_caching": False,
    },
    "contiguous, static": {
        **SMALL_POOL,
        "num_kv_blocks": 70,
        "kv_reservation": "contiguous",
        "enable_prefix_caching": False,
        "batching_mode": "static",
    },
    "one token a step, most generated": {
        **CACHED,
        "max_num_batched_tokens": 1,
        "victim_policy": "most_generated",
    },
    "everything at once": {
        **CACHED,
        "num_kv_blocks": 33,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 5,
        "scheduling_policy": "longest_prefix",
        "victim_policy": "fewest_generated",
        "batching_mode": "static",
        "skip_limit": 2,
    },
}


@pytest.mark.parametrize("name", HARD)
@given(workload=workloads())
@settings(max_examples=3)
def test_no_policy_moves_a_bit(engines: Engines, name: str, workload: Workload) -> None:
    """R12, R32: orders, victims, batching modes and ways of taking memory: the same answers."""
    assert run(engines(**HARD[name]), workload) == engines.alone(workload)
