"""Scenarios: each tells the worked example it is named after, and a wrong one is seen."""

from __future__ import annotations

import pytest

from octavo.cli.main import main
from octavo.sim import scenarios
from octavo.sim.scenarios import SCENARIOS, Scenario
from octavo.sim.timeline import Stage


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_worked_example_comes_out_as_told(name: str) -> None:
    """R13, R18, R27, R95, R97, R105, R109, R113: every number in it is checked, and some are."""
    stage = SCENARIOS[name].play()
    assert stage.failures == []
    assert sum(line.startswith("ok: ") for line in stage.lines) >= 1
    assert not any(line.startswith("FAILED") for line in stage.lines)


def test_the_timeline_of_chunks_is_drawn() -> None:
    """R109: the picture of the worked example, step by step."""
    lines = [
        line.split("  ")[0] + " | " + line[17:].split("  ")[0] for line in play("chunked-1000")
    ]
    assert lines[:6] == [
        "step 1 | A[0-3] B[0-3]",
        "step 2 | A B C[0-255]",
        "step 3 | A B C[256-511]",
        "step 4 | A B C[512-767]",
        "step 5 | A B C[768-999]",
        "step 6 | A B C",
    ]


def play(name: str) -> list[str]:
    return SCENARIOS[name].play().lines


def test_a_timeline_says_who_yields_to_whom_and_why_others_wait() -> None:
    """R97, R105."""
    text = "\n".join(play("preempt-500-10-50"))
    assert "A yields, 515 computed tokens are dropped: D needs its blocks" in text
    assert "A waits: preemption_step" in text
    text = "\n".join(play("no-admission-after-preemption"))
    assert "B waits: it needs 2 blocks, 1 are left" in text


def test_a_failed_expectation_is_shown_and_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> Stage:
        stage = Stage(max_num_seqs=1)
        stage.add("A", 4, 2)
        stage.run()
        stage.expect("steps", len(stage.steps), 3)
        return stage

    monkeypatch.setitem(scenarios.SCENARIOS, "wrong", Scenario("a mistake", wrong))
    assert main(["scenario", "run", "wrong"]) == 1
    out, err = capsys.readouterr()
    assert "FAILED: steps: 2, but it should be 3" in out
    assert "1 expectations failed" in err


def test_scenarios_are_listed_and_run_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)
    assert main(["scenario", "run", "slot-137"]) == 0
    assert "ok: slot of position 25: 137" in capsys.readouterr().out
    assert main(["scenario", "run", "astrology"]) == 1
    assert "one of static-batch" in capsys.readouterr().err
