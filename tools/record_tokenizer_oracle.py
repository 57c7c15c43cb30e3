"""Record what other tokenizers say, for tests/engine: small JSON, made once, checked in.

    python tools/record_tokenizer_oracle.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs transformers, gguf and regex (none of them a dependency of Octavo). Two oracles:
- transformers, for SmolLM2's ids and chats; its import of GGUF files loses the rule that splits
  digits, so the pre-tokeniser of the published tokenizer.json is put back first;
- the regex package, for how each pre-tokeniser cuts text into words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "fixtures" / "tokenizer_oracle.json"

TEXTS = [
    "Hello world! Café déjà vu — 123 😊",
    "  \n\n  x",
    "1234567",
    "don't",
    "DON'T we'll I'd",
    "你好，世界。こんにちは 안녕하세요 2024年",
    "a\tb\t\tc\n\n\nd  e   f ",
    "def f(x):\n    return x**2  # ½ ② ٣\n",
    "cafe\u0301 naïve ﬁ Ⅷ",
    "$5.00 + 10% <= `x` ~ [y]|{z}^2",
    "👩‍👩‍👧‍👦 🇫🇷",
    "Hello, w\u00f6rld\u1ff4\u1f7d\u212a 你好 \u0431\u00b5x 12  ",
    "x\r\ny  \r\n",
    "",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 12 and 30."},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "And 1?"},
    ],
]

# As the published tokenizer.json files have them, a rule after the other.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",  # the file lists the letters one range after the other
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def words(text: str, rules: list[str]) -> list[str]:
    """Cut a text by each rule in turn; what a rule does not match stays a word of its own."""
    import regex

    pieces = [text] if text else []
    for rule in rules:
        cut: list[str] = []
        for piece in pieces:
            position = 0
            for match in regex.finditer(rule, piece):
                cut += [piece[position : match.start()], match[0]]
                position = match.end()
            cut.append(piece[position:])
        pieces = [piece for piece in cut if piece]
    return pieces


def smollm2(path: Path) -> dict[str, Any]:
    """Ids and chats by transformers, with the true pre-tokeniser."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native = tokenizer.backend_tokenizer
    native.normalizer = None
    native.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    chats = [
        {
            "messages": chat,
            "text": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
        }
        for chat in CHATS
    ]
    for chat in chats:
        chat["ids"] = native.encode(chat["text"], add_special_tokens=False).ids
    ids = {text: native.encode(text, add_special_tokens=False).ids for text in TEXTS}
    return {"ids": ids, "chats": chats}


def main() -> None:
    """Write the fixture."""
    recorded = {
        "smollm2": smollm2(Path(sys.argv[1])),
        "words": {name: {t: words(t, rules) for t in TEXTS} for name, rules in RULES.items()},
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))
    OUTPUT.write_text(text.replace('"ids":{', '\n"ids":{').replace('"words":', '\n"words":') + "\n")


if __name__ == "__main__":
    main()
