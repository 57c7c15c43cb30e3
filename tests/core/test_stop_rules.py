"""Stop rules on token ids: R20, C41, C50."""

from __future__ import annotations

from beds.core_bed import CoreBed


def end_of(script: list[int], max_tokens: int = 20, **params: object) -> tuple[int, str, object]:
    """(tokens, finish_reason, stop_reason) of a request that answers with `script`."""
    bed = CoreBed(scripts={0: script})
    bed.add([100, 101], max_tokens, eos_token_ids=(2, 7), **params)
    bed.run()
    event = bed.ends[0]
    assert event.finish_reason is not None
    return len(bed.outputs[0]), event.finish_reason, event.stop_reason


def test_any_end_of_sequence_id_ends_an_answer() -> None:
    """C41: all of the model's ids count; the id is delivered, stop_reason stays empty."""
    assert end_of([50, 7, 51]) == (2, "stop", None)
    assert end_of([50, 51, 2, 52]) == (3, "stop", None)


def test_a_stop_id_names_itself() -> None:
    """stop_reason tells the user's own ids from the model's."""
    assert end_of([50, 9, 51], stop_token_ids=(8, 9)) == (2, "stop", 9)
    assert end_of([50, 7, 51], stop_token_ids=(7,)) == (2, "stop", None)


def test_ignore_eos_keeps_the_users_own_stop_ids() -> None:
    """C41: neither 2 nor 7 stops, 9 does."""
    script = [2, 7, 50, 9, 51]
    assert end_of(script, ignore_eos=True, stop_token_ids=(9,)) == (4, "stop", 9)
    assert end_of(script, max_tokens=3, ignore_eos=True) == (3, "length", None)


def test_nothing_stops_before_min_tokens() -> None:
    """C41: min_tokens=5: the first five end nothing, the sixth may."""
    script = [7, 9, 7, 9, 7, 7, 50]
    assert end_of(script, min_tokens=5, stop_token_ids=(9,)) == (6, "stop", None)
    assert end_of(script, min_tokens=4, stop_token_ids=(9,)) == (5, "stop", None)


def test_the_last_allowed_token_is_length_unless_it_stops() -> None:
    """C50: max_tokens=1 gives exactly one token."""
    assert end_of([50, 51], max_tokens=1) == (1, "length", None)
    assert end_of([7], max_tokens=1) == (1, "stop", None)


def test_an_ended_request_leaves_in_that_step() -> None:
    """R20: it is not in the next plan, and its blocks and row are free."""
    bed = CoreBed(scripts={0: [50, 2]}, enable_prefix_caching=False)
    bed.add([100, 101], 20, eos_token_ids=(2,))
    bed.step()
    bed.step()
    assert bed.scheduler.num_running == 0
    assert bed.scheduler.stats().num_free_blocks == 64
    assert bed.step().scheduled == ()
