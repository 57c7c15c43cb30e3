"""Record a run, play it again without a model: the same decisions, or the first that differs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beds.core_bed import CoreBed
from beds.tiny_files import write_tiny_gguf
from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.core.batching import BATCHING_MODES
from octavo.core.preemption import VICTIM_POLICIES
from octavo.core.waiting_orders import WAITING_ORDERS
from octavo.errors import ConfigError
from octavo.grammar_spec import GrammarSpec
from octavo.trace.record import RecordingFile, RecordingScheduler
from octavo.trace.replay import ReplayError, replay, replay_file


def recorded(*, hashed: bool = False, **settings: Any) -> tuple[CoreBed, list[str]]:
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
        hashed=hashed,
        now=lambda: 100.0 + len(lines),
    )
    return bed, lines


def busy_run(
    *,
    forks: bool = False,
    broken: Container[int] = (),
    scored: Container[int] = (),
    **settings: Any,
) -> list[str]:
    """Preemptions, faults, aborts, stop ids, hits, priorities and tenants in a small pool."""
    bed, lines = recorded(
        num_blocks=12, max_num_batched_tokens=9, max_num_seqs=3, faults={3: 2}, **settings
    )
    bed.model.broken_slots = broken
    long = list(range(20, 29))
    bed.model.scripts = {4: [9, *long, 9], 7: [1, 7, *long, 7], 8: [1, 2, 3, 9, *long, 8]}
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
            eos_token_ids=(9, 10),
            ignore_eos=i == 8,
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
    st.booleans(),
)
def test_a_replay_decides_the_same(policy: str, victim: str, mode: str, hashed: bool) -> None:
    """Under every policy, in the clear and hashed: the plans are equal to the last block id."""
    lines = busy_run(
        scheduling_policy=policy,
        victim_policy=victim,
        batching_mode=mode,
        skip_limit=1,
        hashed=hashed,
    )
    outcome = replay(lines)
    assert outcome.difference is None
    assert outcome.num_requests == 9
    assert outcome.num_steps == sum(json.loads(line)[0] == "plan" for line in lines) > 20


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("means", ["swap", "threshold", "auto", "recompute"])
def test_a_replay_moves_the_same_blocks(means: str, hashed: bool) -> None:
    """Swaps, evictions into the tiers, what a tier loses, and forks: transfers are part of what
    is compared."""
    lines = busy_run(
        forks=True,
        preemption_mode=means,
        swap_threshold=9,
        num_slots=(3, 9),
        hashed=hashed,
        broken={2, 3},
    )
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

    bed.scheduler.recorder._write = write  # type: ignore[attr-defined]
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


def numbers_in(value: Any) -> set[int]:
    if isinstance(value, int):
        return {value}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {number for part in parts for number in numbers_in(part)}


def test_a_hashed_recording_does_not_tell_what_was_said() -> None:
    """No token id of prompt or answer, no stop id, word, scope or tenant is in it; two recordings
    of one run share no number; a token that comes twice in a prompt has two numbers."""
    texts = []
    for _ in range(2):
        bed, lines = recorded(hashed=True, num_blocks=12, faults={2: 3}, num_slots=(4, 4))
        for i in range(3):
            bed.add(
                [700_001, 700_002, 700_001, 700_002, 700_001, 700_003 + i],
                6,
                scope="secret-salt",
                tenant="secret-key",
                stop=("secret-word",),
                bad_words=("secret-word",),
                stop_token_ids=(700_009,),
                eos_token_ids=(700_010,),
            )
        bed.model.scripts = {0: [700_020, 700_009], 1: [700_021, 700_010]}
        bed.run()
        text = "".join(lines)
        assert "secret" not in text
        assert "tape" not in text, "nor what a fault said"
        assert not {n for n in numbers_in([json.loads(x) for x in lines]) if 700_000 < n < 701_000}
        assert replay(lines).difference is None
        texts.append([json.loads(line) for line in lines])
    adds = [[parts for kind, *parts in text if kind == "add"] for text in texts]
    prompts = [[record["prompt_token_ids"] for (record,) in run] for run in adds]
    assert [len(set(prompt)) for prompt in prompts[0]] == [6, 6, 6]
    assert prompts[0][0][:5] == prompts[0][1][:5], "what they share is what a replay has to know"
    assert prompts[0][0][5] != prompts[0][1][5]
    assert not set(prompts[0][0]) & set(prompts[1][0]), "the key is drawn anew"


def test_a_recording_of_kept_prefixes_is_played() -> None:
    """The tree that a run began with is an input, too; hashed, prompts still find themselves."""
    first = CoreBed(num_blocks=16, num_slots=(8, 8))
    for i in range(3):
        first.add([*range(9), i, i, i, i], 5, scope="x" * (i % 2))
    first.run()
    runs = first.scheduler.kv.export_prefixes()
    runs, slot = list(runs), 0
    for number, run in enumerate(runs):
        places = tuple(range(slot, slot := slot + len(run.places)))
        runs[number] = run._replace(places=places, in_tier=True)
    for hashed in (False, True):
        bed, lines = recorded(hashed=hashed, num_blocks=16, num_slots=(8, 8))
        for run in runs:
            tokens, parent = list(run.token_ids), run.parent
            while parent >= 0:
                tokens, parent = [*runs[parent].token_ids, *tokens], runs[parent].parent
            bed.model.keep(tokens, run.places)
        bed.scheduler.import_prefixes(runs)
        for i in range(3):
            bed.add([*range(9), i, i, i, i], 5, scope="x" * (i % 2))
        bed.run()
        assert bed.scheduler.stats().prefix_hits_tokens >= 32
        assert replay(lines).difference is None


def test_what_a_request_cost_to_hash_ends_with_it() -> None:
    """No state is left of requests that finished, failed or were aborted."""
    bed, _ = recorded(hashed=True, faults={1: 2})
    for i in range(4):
        bed.add([1, 2, 3, i], 6)
    bed.step()
    bed.step(lambda: bed.scheduler.finish(2, "abort"))
    bed.run()
    assert bed.scheduler.recorder._states == {}


@given(st.data())
def test_a_damaged_recording_is_refused_and_never_a_crash(data: st.DataObject) -> None:
    """Any byte of it changed, lines lost, doubled or swapped: played, different or refused."""
    lines = list(DAMAGED_LINES)
    how = data.draw(st.sampled_from(["byte", "lose", "double", "swap", "cut", "value"]))
    at = data.draw(st.integers(0, len(lines) - 1))
    if how == "byte":
        where = data.draw(st.integers(0, len(lines[at]) - 2))
        new = chr(data.draw(st.integers(32, 126)))
        lines[at] = lines[at][:where] + new + lines[at][where + 1 :]
    elif how == "lose":
        del lines[at]
    elif how == "double":
        lines.insert(at, lines[at])
    elif how == "swap":
        lines[at], lines[0] = lines[0], lines[at]
    elif how == "cut":
        lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at]) - 1))]
    else:
        value = data.draw(st.sampled_from([None, -1, 10**18, "x", [], {}, [[]], 1.5, True]))
        parts = json.loads(lines[at])
        parts[data.draw(st.integers(0, len(parts) - 1))] = value
        lines[at] = json.dumps(parts) + "\n"
    with contextlib.suppress(ReplayError):
        outcome = replay(lines)
        assert outcome.num_steps <= len(lines)


DAMAGED_LINES = busy_run(forks=True, preemption_mode="swap", num_slots=(3, 9))


@pytest.mark.parametrize(
    "edit",
    [
        {"num_blocks": 10**12},
        {"num_slots": [10**12, 0]},
        {"num_blocks": -5},
        {"num_blocks": 1.5},
        {"num_slots": []},
    ],
)
def test_sizes_that_can_not_be_are_refused_without_memory(edit: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match="line 1 "):
        replay(edited(DAMAGED_LINES, 3, **edit))
    with pytest.raises(ReplayError, match="line 1 "):
        replay(edited(DAMAGED_LINES, 1, max_num_seqs=10**12))


def test_a_file_of_something_else_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes that are no text, a folder, JSON that nests too deep, another program's log."""
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "deep").write_text("[" * 100_000 + "\n")
    (tmp_path / "log").write_text("2026-01-01 INFO hello\n" * 3)
    (tmp_path / "folder").mkdir()
    for name in ("binary", "deep", "log", "folder"):
        assert main(["replay", str(tmp_path / name)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("octavo: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err


RECORDED = """
import sys
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference", max_model_len=128, num_kv_blocks=12, block_size=8,
          ram_tier_memory=1 << 15, preemption_mode="swap", record=sys.argv[2], record_hashes=True)
params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
print("ready", flush=True)
for i in range(10**9):
    prompts = [[3 + (7 * (i + k) + 5 * j) % 40 for j in range(30 + 9 * k)] for k in range(4)]
    llm.generate(prompts, params, use_tqdm=False)
"""


def test_a_killed_recording_is_played_to_its_last_whole_line(tmp_path: Path) -> None:
    """SIGKILL in the middle of serving: what is there agrees, and only its owner can read it."""
    path = tmp_path / "run.jsonl"
    busy = subprocess.Popen(
        [sys.executable, "-c", RECORDED, str(write_tiny_gguf(tmp_path / "m.gguf")), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    assert busy.stdout is not None
    busy.stdout.readline()
    while path.stat().st_size < 100_000:
        time.sleep(0.01)
    busy.kill()
    busy.wait()
    busy.stdout.close()
    outcome = replay_file(path)
    assert outcome.difference is None
    assert outcome.num_steps > 20
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_a_file_that_can_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """And one that is full says so when it is written, not before and not later."""
    full = RecordingFile("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        full.write("x\n")
    full.close()
    for name in ("missing/run", ""):
        with pytest.raises(ConfigError, match="record"):
            RecordingFile(str(tmp_path / name))


def test_two_recordings_never_share_a_file(tmp_path: Path) -> None:
    """The second is refused before it touches what the first has written; once that has ended,
    or was killed, the file is free, and what was in it goes. Devices are everybody's."""
    (path := tmp_path / "run").write_text("left by another")
    path.chmod(0o666)
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    first = LLM(model, record=str(path), num_kv_blocks=8, max_model_len=64)
    before = path.read_text()
    assert before.startswith('["octavo"')
    assert oct(path.stat().st_mode)[-3:] == "600"
    with pytest.raises(ConfigError, match="nobody else records to"):
        LLM(model, record=str(path), num_kv_blocks=8, max_model_len=64)
    assert path.read_text() == before
    first.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    first.close()
    assert replay_file(path).num_requests == 1
    LLM(model, record=str(path), num_kv_blocks=8, max_model_len=64).close()
    assert replay_file(path).num_requests == 0
    both = [RecordingFile("/dev/null") for _ in range(2)]
    for file in both:
        file.write("x\n")
        file.close()


def test_a_plan_has_its_time() -> None:
    """Seconds since the start; another clock is no other decision."""
    lines = busy_run()
    times = [json.loads(line)[2] for line in lines if line.startswith('["plan"')]
    assert times == sorted(times)
    assert times[-1] > times[0] > 0
    parts = [json.loads(line) for line in lines]
    later = [json.dumps([*p[:2], 9.9] if p[0] == "plan" else p) + "\n" for p in parts]
    assert replay(later).difference is None
