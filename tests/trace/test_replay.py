"""Record a run, play it again without a model: the same decisions, or the first that differs."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.core_bed import CoreBed
from octavo.cli.main import main
from octavo.core.batching import BATCHING_MODES
from octavo.core.preemption import VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS
from octavo.grammar_spec import GrammarSpec
from octavo.trace.record import RecordingScheduler
from octavo.trace.replay import ReplayError, replay


def recorded(**settings: Any) -> tuple[CoreBed, list[str]]:
    """A bed whose scheduler writes down what it does."""
    bed = CoreBed(**settings)
    lines: list[str] = []
    old = bed.scheduler
    cache = old.kv
    bed.scheduler = RecordingScheduler(
        bed.config,
        bed.cache_config,
        num_blocks=cache.pool.num_blocks,
        max_model_len=old.limits.max_model_len,
        num_slots=bed.model.num_slots,
        write=lines.append,
    )
    return bed, lines


def busy_run(*, forks: bool = False, scored: Container[int] = (), **settings: Any) -> list[str]:
    """Preemptions, faults, aborts, stop ids, hits, priorities and tenants in a small pool."""
    bed, lines = recorded(
        num_blocks=12, max_num_batched_tokens=9, max_num_seqs=3, faults={3: 2}, **settings
    )
    for i in range(9):
        like = 0 if forks and i == 1 else i
        stem = list(range(like % 3 * 100, like % 3 * 100 + 9))
        bed.add(
            [*stem, like],
            8 + i,
            priority=i % 2,
            tenant=str(i % 3),
            scope="x" * (i % 4 == 3),
            leader=0 if forks and i == 1 else None,
            stop_token_ids=(7, 8),
            min_tokens=2,
            prompt_logprobs=0 if i in scored else None,
        )
        bed.step()
        if i == 6:
            bed.scheduler.finish(5, "abort")
            bed.step(lambda: bed.scheduler.finish(6, "stop"))
    if bed.scheduler.running:
        bed.scheduler.preempt(next(iter(bed.scheduler.running)))
    bed.run()
    return lines


@given(
    st.sampled_from(sorted(WAITING_ORDERS)),
    st.sampled_from(sorted(VICTIM_POLICIES)),
    st.sampled_from(sorted(BATCHING_MODES)),
)
def test_a_replay_decides_the_same(policy: str, victim: str, mode: str) -> None:
    """Under every policy: the plans are equal to the last block id."""
    lines = busy_run(
        scheduling_policy=policy, victim_policy=victim, batching_mode=mode, skip_limit=1
    )
    outcome = replay(lines)
    assert outcome.difference is None
    assert outcome.num_requests == 9
    assert outcome.num_steps == sum(json.loads(line)[0] == "plan" for line in lines) > 20


@pytest.mark.parametrize("means", ["swap", "threshold", "auto", "recompute"])
def test_a_replay_moves_the_same_blocks(means: str) -> None:
    """Swaps, evictions into the tiers and forks: transfers are part of what is compared."""
    lines = busy_run(forks=True, preemption_mode=means, swap_threshold=9, num_slots=(3, 9))
    assert replay(lines).difference is None
    plans = [json.loads(line)[1] for line in lines if json.loads(line)[0] == "plan"]
    kinds = {transfer[0] for plan in plans for transfer in plan["transfers"]}
    assert kinds >= {"copy", "store"}
    before = replay([*lines[:1], *(line.replace('"store"', '"lost"') for line in lines[1:])])
    assert "transfers was" in str(before.difference)


@pytest.mark.parametrize("means", ["swap", "recompute"])
def test_a_replay_knows_which_prompts_are_scored(means: str) -> None:
    """What a request may take from the prefix cache depends on the scores that it has (C43)."""
    lines = busy_run(scored=range(9), forks=True, preemption_mode=means, num_slots=(3, 9))
    assert replay(lines).difference is None
    cut = [
        json.dumps([*json.loads(line)[:-1], []]) + "\n" if line.startswith('["result"') else line
        for line in lines
    ]
    assert "step" in str(replay(cut).difference)


def edited(lines: list[str], number: int, **settings: object) -> list[str]:
    """The recording, with other settings in its head (number 1: of the scheduler)."""
    head = json.loads(lines[0])
    head[number + 1].update(settings)
    return [json.dumps(head) + "\n", *lines[1:]]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8},
        {"scheduling_policy": "priority"},
        {"victim_policy": "most_generated"},
        {"max_num_seqs": 2},
    ],
)
def test_another_decision_is_reported_in_the_step_where_it_is_made(
    settings: dict[str, object],
) -> None:
    """The line names the step, what was decided, and what is decided now."""
    lines = busy_run()
    outcome = replay(edited(lines, 1, **settings))
    assert outcome.difference is not None
    assert outcome.difference.startswith(f"step {outcome.num_steps}: ")
    assert "now it is" in outcome.difference
    plans = [json.loads(line)[1] for line in lines if line.startswith('["plan"')]
    assert outcome.num_steps < len(plans)


def test_a_changed_result_changes_what_follows() -> None:
    """Inputs are part of the recording: an answer that ends elsewhere is seen."""
    lines = busy_run()
    at = next(i for i, line in enumerate(lines) if line.startswith('["result"') and i > 40)
    kind, step, sampled, *rest = json.loads(lines[at])
    sampled[0][1] = 7  # a stop id
    lines[at] = json.dumps([kind, step, sampled, *rest]) + "\n"
    outcome = replay(lines)
    assert outcome.difference is not None
    assert outcome.num_steps >= step


def test_a_recording_that_was_cut_is_played_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = busy_run()
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines))
    assert main(["replay", str(path)]) == 0
    assert "9 requests: the same decisions" in capsys.readouterr().out
    path.write_text("".join(lines)[:-10])
    assert main(["replay", str(path)]) == 0
    assert "ends in the middle" in capsys.readouterr().err
    path.write_text("".join(edited(lines, 1, max_num_seqs=1)))
    assert main(["replay", str(path)]) == 1
    assert "a decision differs in step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", "[1,2]\n", '["octavo",99,{},{},{}]\n', "[]\n", "[" * 100_000 + "\n"],
    ids=["empty", "no json", "no head", "other version", "nothing", "too deep"],
)
def test_what_is_no_recording_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReplayError):
        replay(text.splitlines(keepends=True))
    path = tmp_path / "x"
    path.write_text(text)
    assert main(["replay", str(path)]) == 1
    assert main(["replay", str(tmp_path / "missing")]) == 1
    assert "can't be read" in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    bed, lines = recorded()

    def write(line: str) -> None:
        if len(lines) == 5:
            raise OSError(28, "No space left on device")
        lines.append(line)

    bed.scheduler._write = write  # type: ignore[attr-defined]
    bed.add([1, 2, 3], 9)
    bed.run()
    assert len(bed.outputs[0]) == 9
    assert caplog.text.count("the recording ends here") == 1
    assert replay(lines).difference is None


@pytest.mark.parametrize("part", ["5", "null", "{}", "[]", '"x"', '{"step":1}'])
@pytest.mark.parametrize("kind", ["add", "finish", "preempt", "plan", "kept", "result", "other"])
def test_a_damaged_line_is_named(kind: str, part: str) -> None:
    """Whatever a line is, there is no traceback: it can't be played, or parts from the run."""
    lines = busy_run()
    lines[3] = f'["{kind}",{part}]\n'
    try:
        found = replay(lines).difference
    except ReplayError as error:
        found = str(error)
    assert found is not None
    assert "line" in found or "step" in found or "ended" in found


def test_a_request_held_to_a_form_can_be_played() -> None:
    """What the matcher decided is in the file as an end from outside; the form itself is not."""
    bed, lines = recorded()
    bed.add([1, 2, 3], 9, grammar=GrammarSpec.regex("a{3}"))
    bed.step()
    bed.scheduler.finish(0, "stop")
    bed.run()
    assert replay(lines).difference is None
