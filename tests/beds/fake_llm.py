"""A stand-in for octavo.engine.llm.LLM that answers from a script: for tests of front ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from octavo.outputs import CompletionOutput, RequestOutput, StreamEvent
from octavo.sampling_params import SamplingParams


class FakeTokenizer:
    """A token a character; the chat template writes <role>content."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<answer>")


class FakeLLM:
    """Streams `script`, an item a token; an exception in it is raised at its turn."""

    script: list[Any]
    """Set by a subclass or by the test."""

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self.config = SimpleNamespace(model=model)
        self.settings = settings
        self.tokenizer = FakeTokenizer()
        self.load_seconds = 0.25
        self.asked: list[tuple[str, SamplingParams]] = []
        self.num_closed = 0
        """Streams that were closed."""
        self.is_closed = False
        self._steps = 7
        made.append(self)

    def close(self) -> None:
        self.is_closed = True

    def default_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, top_p=0.9)

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        return 2000 - num_prompt_tokens

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(steps=self._steps, num_preemptions=self._steps // 10)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        self.asked.append(("".join(map(chr, prompt)), params))
        try:
            for number, item in enumerate(self.script, 1):
                if isinstance(item, str):
                    last = number == len(self.script)
                    reason = "stop" if last else None
                    yield StreamEvent(
                        0, 0, item, (number,), finish_reason=reason, num_generated_tokens=number
                    )
                elif isinstance(item, StreamEvent):
                    yield item
                elif callable(item):
                    item()
                else:
                    raise item
        finally:
            self.num_closed += 1

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs = []
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            assert one.greedy
            assert one.ignore_eos
            assert one.max_tokens is not None
            answer = CompletionOutput(
                0, finish_reason="length", num_generated_tokens=one.max_tokens
            )
            outputs.append(RequestOutput(number, None, prompt, [answer], num_cached_tokens=2))
        self._steps += 20
        return outputs


made: list[FakeLLM] = []
"""Every FakeLLM of this test, oldest first."""
