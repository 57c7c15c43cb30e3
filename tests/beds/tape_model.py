"""TapeModel: an executor without arithmetic that turns silent KV corruption into an exception.

A slot of its KV pool holds who wrote it, which token, at which position, after which history.
Each step writes the scheduled tokens through the persistent block table of their row, then reads
the whole sequence back through the same table: a slot that is unwritten, or holds another token,
position or history, raises. A slot of a shared prefix, written by somebody else with the same
history, is right. The next token is a function of the whole history and of where the prompt ends,
so it also shows when a resumed request takes its output for prompt (C14).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from octavo.messages import (
    SMALL_MODEL,
    NewRequest,
    PromptLogprobs,
    RowFault,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
    Transfer,
)

MASK = 2**64 - 1


class KVCorruption(AssertionError):
    """A row read something that it can't have written, nor shared."""


class Slot(NamedTuple):
    """What stands for K and V of one token."""

    owner: int
    token_id: int
    position: int
    history: int


class StepTrace(NamedTuple):
    """What one step was made of, by request id, in the order of the plan."""

    step: int
    num_new_tokens: dict[int, int]
    started: tuple[int, ...]
    first_position: dict[int, int]


class TapeRow:
    """The worker's persistent state of one row."""

    def __init__(self, start: NewRequest) -> None:
        self.start = start
        self.token_ids = list(start.token_ids)
        self.block_table: list[int] = []
        self.histories: list[int] = []
        self.num_scored = start.num_prompt_logprobs
        self._extend()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.start.num_prompt_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._extend()

    def _extend(self) -> None:
        """histories[i] stands for tokens 0..i; a wide hash, so equal means equal."""
        history = self.histories[-1] if self.histories else 0
        for token_id in self.token_ids[len(self.histories) :]:
            history = mix(history, token_id)
            self.histories.append(history)


def mix(history: int, value: int) -> int:
    """A 64-bit hash of a hash and a number; the same in every process."""
    history = (history ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    history = (history ^ history >> 27) * 0x94D049BB133111EB & MASK
    return history ^ history >> 31


class TapeModel:
    """An Executor. `scripts` fixes the outputs of some requests; `faults` breaks rows.

    faults: {request id: output index}: the row fails instead of sampling that token; a negative
    index fails it in its first step, even if that samples nothing.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int = 1 << 20,
        vocab_size: int = 1000,
        scripts: Mapping[int, Sequence[int]] | None = None,
        faults: Mapping[int, int] | None = None,
        num_slots: tuple[int, int] = (0, 0),
    ) -> None:
        self.num_kv_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.scripts = dict(scripts or {})
        self.faults = dict(faults or {})
        self.num_slots = self.num_tier_slots = num_slots
        self.costs = SMALL_MODEL
        self.kept: dict[int, list[Slot | None] | None] = {}
        """What is stored in each slot of the tiers; None: what was lost before it came there."""
        self.broken_slots: Container[int] = ()
        """Those that can't be read."""
        self.slots: list[Slot | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, TapeRow] = {}
        self.traces: list[StepTrace] = []
        self.max_block_id = -1
        self.moves: Counter[str] = Counter()
        self.lost: set[int] = set()

    def submit(self, plan: SchedulerOutput) -> StepResult:
        """Compute a step."""
        for start in plan.starts:
            self.rows[start.row] = TapeRow(start)
        for number, token_ids in plan.forced:
            for token_id in token_ids:
                self.rows[number].append(token_id)
        self.lost = set()
        for transfer in plan.transfers:
            self._move(transfer)
        for entry in plan.scheduled:
            self._write(entry)
        sampled: list[SampledToken] = []
        faults: list[RowFault] = []
        scored: list[PromptLogprobs] = []
        for entry in plan.scheduled:
            row = self.rows[entry.row]
            if self.lost & set(entry.new_block_ids):
                faults.append(RowFault(entry.row, "K/V could not be read back", retry=True))
                continue
            self._read_back(entry, row)
            if row.start.params.prompt_logprobs is not None:
                scored.append(self._score(entry, row))
            if self._fails(entry, row):
                faults.append(RowFault(entry.row, "the tape tore"))
            elif entry.samples:
                token_id = self._next_token(row)
                row.append(token_id)
                sampled.append(SampledToken(entry.row, token_id))
        self._trace(plan)
        return StepResult(plan.step, tuple(sampled), tuple(faults), tuple(scored))

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def describe(self) -> dict[str, str]:
        return {"backend": "tape"}

    def close(self) -> None:
        pass

    def poison(self, block_id: int) -> None:
        """Overwrite a block with what nobody can have written."""
        start = block_id * self.block_size
        for slot in range(start, start + self.block_size):
            self.slots[slot] = Slot(-1, -1, -1, -1)

    def keep(self, token_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Have in these slots the last blocks of a prompt, as another process left them."""
        history, written = 0, list[Slot | None]()
        for position, token_id in enumerate(token_ids):
            history = mix(history, token_id)
            written.append(Slot(-1, token_id, position, history))
        for number, slot in enumerate(reversed(slots)):
            end = len(written) - number * self.block_size
            self.kept[slot] = written[end - self.block_size : end]

    def slot_of(self, row: TapeRow, position: int) -> int:
        """slot = block_table[position // block_size] * block_size + position % block_size."""
        block_index, offset = divmod(position, self.block_size)
        return row.block_table[block_index] * self.block_size + offset

    def block(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _move(self, transfer: Transfer) -> None:
        kind, source, target = transfer
        self.moves[kind] += 1
        if kind == "copy":
            self.slots[self.block(target)] = self.slots[self.block(source)]
            if source in self.lost:
                self.lost.add(target)
        elif kind == "store":
            assert target < sum(self.num_slots), "a tier is larger than its budget"
            if target in self.kept:
                raise KVCorruption(f"what is kept in slot {target} was not given up")
            self.kept[target] = None if source in self.lost else self.slots[self.block(source)]
        elif kind == "drop":
            del self.kept[target]
        else:
            assert kind == "load"
            if source not in self.kept:
                raise KVCorruption(f"nothing is kept in slot {source}")
            kept = self.kept[source]
            if source in self.broken_slots or kept is None:
                self.poison(target)
                self.lost.add(target)
            else:
                self.slots[self.block(target)] = kept

    def _write(self, entry: ScheduledRequest) -> None:
        row = self.rows[entry.row]
        row.block_table += entry.new_block_ids
        self.max_block_id = max(self.max_block_id, *entry.new_block_ids, -1)
        end = entry.num_computed_tokens + entry.num_new_tokens
        if not entry.num_computed_tokens < end <= len(row.token_ids):
            raise KVCorruption(f"{entry} computes what {row.start.request_id} does not know")
        if entry.samples != (end == len(row.token_ids)):
            raise KVCorruption(f"{entry} is wrong about sampling, of {len(row.token_ids)} tokens")
        for position in range(entry.num_computed_tokens, end):
            self.slots[self.slot_of(row, position)] = Slot(
                row.start.request_id, row.token_ids[position], position, row.histories[position]
            )

    def _read_back(self, entry: ScheduledRequest, row: TapeRow) -> None:
        for position in range(entry.num_computed_tokens + entry.num_new_tokens):
            slot = self.slots[self.slot_of(row, position)]
            wanted = (row.token_ids[position], position, row.histories[position])
            if slot is None or slot[1:] != wanted:
                raise KVCorruption(
                    f"request {row.start.request_id} wants (token, position, history) {wanted} "
                    f"in slot {self.slot_of(row, position)}, which holds {slot}"
                )

    def _score(self, entry: ScheduledRequest, row: TapeRow) -> PromptLogprobs:
        """The prompt tokens that follow these positions, each once and in order (C43)."""
        begin, last = row.num_scored, row.start.num_prompt_tokens - 1
        if entry.num_computed_tokens > begin < last:
            raise KVCorruption(f"{entry} leaves prompt token {begin + 1} without a score")
        row.num_scored = max(begin, min(entry.num_computed_tokens + entry.num_new_tokens, last))
        scores = (TokenLogprobs(float(-i), 1, ()) for i in range(begin, row.num_scored))
        return PromptLogprobs(entry.row, tuple(scores))

    def _fails(self, entry: ScheduledRequest, row: TapeRow) -> bool:
        index = self.faults.get(row.start.request_id)
        if index is None:
            return False
        return index < 0 or (entry.samples and row.num_output_tokens == index)

    def _next_token(self, row: TapeRow) -> int:
        script = self.scripts.get(row.start.request_id)
        if script is not None and row.num_output_tokens < len(script):
            return script[row.num_output_tokens]
        return mix(row.histories[-1], row.start.num_prompt_tokens) % self.vocab_size

    def _trace(self, plan: SchedulerOutput) -> None:
        ids = {entry.row: self.rows[entry.row].start.request_id for entry in plan.scheduled}
        self.traces.append(
            StepTrace(
                plan.step,
                {ids[entry.row]: entry.num_new_tokens for entry in plan.scheduled},
                tuple(start.request_id for start in plan.starts),
                {ids[entry.row]: entry.num_computed_tokens for entry in plan.scheduled},
            )
        )
