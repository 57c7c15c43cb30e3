"""The sampler straight from the definitions: float64, Python loops, no shortcut; an oracle.

It shares no code with octavo.sampling, the noise included. Rounding to float32 may part the two
where a decision hangs by less than MARGIN; the reference says so in `certain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from octavo.sampling_params import SamplingParams

MARGIN = 1e-4
"""In nats between logits or p/q ratios, and in probability at top-p's border. The logits of the
tests are below 64 and temperatures at least 0.1, so that float32 rounds by at most about
64 * 2**-24 / 0.1 = 4e-5 of it."""

_MASK = 2**64 - 1


class Choice(NamedTuple):
    token_id: int | None
    """None: nothing left to sample."""
    certain: bool


def uniform(seed: int, position: int, token_id: int) -> float:
    """u of one token: splitmix64 output number token_id of the (seed, position) stream."""

    def finalise(z: int) -> int:
        z &= _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z

    def mix(z: int) -> int:
        z = finalise(z)
        return z ^ (z >> 31)

    key = mix(mix(seed + 0x9E3779B97F4A7C15) + (position + 1) * 0xD1342543DE82EF95)
    return ((finalise(key + token_id * 0x9E3779B97F4A7C15) >> 32) + 0.5) / 2**32


def processed_logits(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> list[float]:
    """After constraints and penalties (steps 0 to 2)."""
    result = [-math.inf if math.isnan(x) else float(x) for x in logits]
    vocab = range(len(result))
    if params.allowed_token_ids is not None:
        result = [result[i] if i in params.allowed_token_ids else -math.inf for i in vocab]
    if len(output) < params.min_tokens:
        ending = {*eos, *params.stop_token_ids}
        result = [-math.inf if i in ending else result[i] for i in vocab]
    for *before, last in params.bad_words_token_ids:
        if last < len(result) and list(output)[len(output) - len(before) :] == before:
            result[last] = -math.inf
    for token_id, value in params.logit_bias:
        if token_id < len(result):
            result[token_id] += value
    for name, settings in params.logits_processors:
        if name == "dry":
            result = without_repetitions(result, dict(settings), [*prompt, *output])
    for i in vocab:
        if i in prompt or i in output:
            penalty = params.repetition_penalty
            result[i] = result[i] / penalty if result[i] > 0 else result[i] * penalty
        if i in output:
            result[i] -= params.frequency_penalty * list(output).count(i)
            result[i] -= params.presence_penalty
    return result


def without_repetitions(
    logits: Sequence[float], settings: dict[str, Any], tokens: Sequence[int]
) -> list[float]:
    """DRY without breakers: each token that would go on with a repetition, by the longest one."""
    longest = [0] * len(logits)
    for place, token_id in enumerate(tokens):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        longest[token_id] = max(longest[token_id], length)
    allowed, base = settings.get("allowed_length", 2), settings.get("base", 1.75)
    multiplier = settings.get("multiplier", 0.8)
    return [
        x - multiplier * base ** (n - allowed) if n >= allowed else x
        for x, n in zip(logits, longest, strict=True)
    ]


def typical_tokens(scaled: dict[int, float], p: float) -> dict[int, float]:
    """Those whose information is nearest to the entropy, until they sum to p."""
    total = math.fsum(map(math.exp, scaled.values()))
    chance = {i: math.exp(x) / total for i, x in scaled.items()}
    entropy = -math.fsum(q * math.log(q) for q in chance.values())
    kept, reached = {}, 0.0
    for i in sorted(chance, key=lambda i: (abs(-math.log(chance[i]) - entropy), i)):
        if reached >= p:
            break
        kept[i] = scaled[i]
        reached += chance[i]
    return kept


def without_top_choices(scaled: dict[int, float], threshold: float) -> dict[int, float]:
    """All at or above the threshold dropped, but the least likely of them."""
    total = math.fsum(map(math.exp, scaled.values()))
    top = [i for i, x in scaled.items() if math.exp(x) / total >= threshold]
    least = min(top, key=lambda i: (scaled[i], -i), default=None)
    return {i: x for i, x in scaled.items() if i not in top or i == least}


def exact_mixture(logits: Sequence[float], params: SamplingParams, **history: Any) -> list[float]:
    """Probability of each token after all steps, over all seeds; plug-ins included."""
    processed = processed_logits(logits, params, **history)
    best = max(processed)
    scaled = {i: (x - best) / params.temperature for i, x in enumerate(processed) if x > -math.inf}
    weighted = [(1.0, scaled)]
    for name, pairs in params.logits_processors:
        settings = dict(pairs)
        if name == "typical":
            weighted = [(w, typical_tokens(x, settings.get("p", 0.95))) for w, x in weighted]
        if name == "xtc":
            chance, threshold = settings.get("probability", 0.5), settings.get("threshold", 0.1)
            weighted = [(w * (1 - chance), x) for w, x in weighted] + [
                (w * chance, without_top_choices(x, threshold)) for w, x in weighted
            ]
    cuts = replace(params, temperature=1.0, logits_processors=())
    mixture = [0.0] * len(logits)
    for weight, left in weighted:
        row = [left.get(i, -math.inf) for i in range(len(logits))]
        for i, probability in enumerate(exact_distribution(row, cuts)):
            mixture[i] += weight * probability
    return mixture


def kept_tokens(logits: Sequence[float], params: SamplingParams) -> tuple[dict[int, float], bool]:
    """(token id -> temperature-scaled logit minus the best one, certain) after steps 4 to 7."""
    best = max(logits)
    scaled = {i: (x - best) / params.temperature for i, x in enumerate(logits) if x > -math.inf}
    certain = True
    if params.min_p > 0:
        floor = math.log(params.min_p)
        certain &= all(abs(x - floor) > MARGIN for x in scaled.values())
        scaled = {i: x for i, x in scaled.items() if x >= floor}
    order = sorted(scaled, key=lambda i: (-scaled[i], i))
    if 0 < params.top_k < len(order):
        gap = scaled[order[params.top_k - 1]] - scaled[order[params.top_k]]
        certain &= gap == 0 or gap > MARGIN
        order = order[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(scaled[i]) for i in order)
        kept, before = [], 0.0
        for i in order:
            certain &= abs(before - params.top_p) > MARGIN
            if before >= params.top_p:
                break
            kept.append(i)
            before += math.exp(scaled[i]) / total
        certain &= abs(before - params.top_p) > MARGIN
        order = kept
    return {i: scaled[i] for i in sorted(order)}, certain


def exact_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of each token, given processed logits."""
    kept, _ = kept_tokens(logits, params)
    total = math.fsum(math.exp(x) for x in kept.values())
    return [math.exp(kept[i]) / total if i in kept else 0.0 for i in range(len(logits))]


def reference_sample(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    seed: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> Choice:
    """The token after prompt and output."""
    processed = processed_logits(logits, params, prompt=prompt, output=output, eos=eos)
    if max(processed) == -math.inf:
        return Choice(None, True)
    if params.greedy:
        scores, certain = dict(enumerate(processed)), True
    else:
        scores, certain = kept_tokens(processed, params)
        position = len(prompt) + len(output)
        for i in scores:
            scores[i] -= math.log(-math.log1p(-uniform(seed, position, i)))
    ranking = sorted(scores, key=lambda i: (-scores[i], i))
    if len(ranking) > 1:
        gap = scores[ranking[0]] - scores[ranking[1]]
        certain &= gap == 0 or gap > MARGIN
    return Choice(ranking[0], certain)


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Raw log probabilities."""
    best = max(logits)
    return [
        x - best - math.log(math.fsum(math.exp(y - best) for y in logits))
        for x in map(float, logits)
    ]
