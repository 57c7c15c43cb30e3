"""`cheapest`: the victim that is quickest to bring back."""

from __future__ import annotations

from beds.core_bed import CoreBed, alone
from octavo.core.preemption import VICTIM_POLICIES
from octavo.request import Request
from octavo.sampling_params import SamplingParams


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that no other `start` shares."""
    return list(range(start * 10_000, start * 10_000 + length))


def test_cheapest_yields_who_is_back_soonest() -> None:
    """R97: by the tokens that it would compute again, less those that others keep; or, where its
    means is to swap, by the bytes; or by what is left where the tiers are full."""

    def costs(bed: CoreBed) -> list[int]:
        return [bed.scheduler._preemption.cost(r, bed.scheduler.kv) for r in bed.requests.values()]

    def choose(bed: CoreBed) -> int:
        victims = VICTIM_POLICIES["cheapest"](
            lambda request: bed.scheduler._preemption.cost(request, bed.scheduler.kv)
        )
        return victims.choose(bed.requests.values()).request_id

    def bed_of(means: str, slots: int, **settings: object) -> CoreBed:
        """A and B share 40 tokens, C has 24 and D 28 of its own; 10 us for a token."""
        bed = CoreBed(
            preemption_mode=means,
            num_slots=(slots, 0),
            victim_policy="cheapest",
            swap_threshold=28,
            **settings,
        )
        for tail in (prompt(6, 5), prompt(2, 6)):
            bed.add([*prompt(40), *tail], 9)
            bed.step()
        bed.add(prompt(24, 1), 9)
        bed.add(prompt(28, 2), 9)
        bed.step()
        bed.set_rates(us_per_token=10, store=(7, 7), load=(8, 8))
        return bed

    bed = bed_of("recompute", 0)
    assert costs(bed) == [80, 30, 240, 280]
    assert choose(bed) == 1
    bed = bed_of("recompute", 0, enable_prefix_caching=False)
    assert costs(bed) == [480, 430, 240, 280]
    assert choose(bed) == 2
    bed = bed_of("swap", 64)
    assert costs(bed) == [15 * 12, 15 * 11, 15 * 6, 15 * 7]
    assert choose(bed) == 2
    bed = bed_of("threshold", 64)
    assert costs(bed) == [15 * 12, 15 * 11, 240, 15 * 7]
    assert choose(bed) == 3
    bed = bed_of("auto", 64)
    assert costs(bed) == [80, 30, 15 * 6, 15 * 7]
    bed = bed_of("swap", 6)
    assert costs(bed) == [80, 30, 15 * 6, 280], "only C fits in the tier"
    assert choose(bed) == 1


def test_equals_in_cost_yield_by_arrival() -> None:
    """C8: who came last, however they are asked."""
    requests = [Request(i, prompt(8, i), SamplingParams(), max_tokens=6) for i in range(4)]
    victims = VICTIM_POLICIES["cheapest"](lambda request: request.request_id // 2)
    assert victims.choose(requests) is victims.choose(requests[::-1]) is requests[1]


def test_cheapest_spares_who_has_most_to_lose() -> None:
    """R97: not who came last: the short one yields, and every answer is whole."""
    bed = CoreBed(num_blocks=9, victim_policy="cheapest")
    short, long = bed.add(prompt(4), 16), bed.add(prompt(20, 1), 9)
    bed.run()
    assert bed.requests[short].num_preemptions > 0
    assert bed.requests[long].num_preemptions == 0
    assert [bed.outputs[i] for i in (0, 1)] == [alone(prompt(4), 16), alone(prompt(20, 1), 9)]
