"""Arguments: what is accepted, what is refused, and that neither loads anything heavy."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.main import build_parser, main
from octavo.cli.options import config_of, normalise, settings_of, size
from octavo.config import PARTS, field_docs

COMMANDS = (
    ["serve"],
    ["generate", "--prompt", "x"],
    ["chat"],
    ["bench", "throughput", "--workload", "w"],
)


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(normalise(arguments))


def exit_code(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_every_setting_is_a_flag_of_every_command_that_loads(command: list[str]) -> None:
    """The engine's settings under vLLM's names, everywhere."""
    args = parse(
        *command, "some-model", "--backend", "reference", "--threads", "2", "--isa", "avx2",
        "--dtype", "float32", "--kv-cache-dtype", "float32", "--seed", "7", "--max-num-seqs", "3",
        "--max-num-batched-tokens", "2k", "--max-num-scheduled-tokens", "9",
        "--max-model-len", "8k", "--block-size", "8", "--kv-cache-memory", "1.5g",
        "--scheduling-policy", "fcfs", "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
    )  # fmt: skip
    config = config_of(args)
    assert (config.model, config.seed) == ("some-model", 7)
    assert (config.backend.backend, config.backend.threads) == ("reference", 2)
    assert config.scheduler.max_num_batched_tokens == 2048
    assert (config.scheduler.max_model_len, config.scheduler.token_budget) == (8192, 9)
    assert not config.scheduler.enable_chunked_prefill
    assert config.cache.kv_cache_memory == 3 << 29
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (8, False)


def test_each_setting_of_the_config_has_a_flag_with_its_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting added to the config can't be forgotten in the command line or its help."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert exit_code("serve", "--help") == 0
    shown = capsys.readouterr().out
    for cls in PARTS.values():
        docs = field_docs(cls)
        for field in fields(cls):
            assert "--" + field.name.replace("_", "-") in shown
            assert docs[field.name] in shown


def test_only_settings_that_were_given_reach_the_config() -> None:
    """Defaults are stated once, in the config classes."""
    assert settings_of(parse("serve")) == {}
    assert settings_of(parse("serve", "--threads", "2")) == {"threads": 2}


def test_dashes_and_underscores_are_the_same() -> None:
    dashed = parse("serve", "--max-num-seqs=5", "--no-enable-prefix-caching")
    underscored = parse("serve", "--max_num_seqs=5", "--no_enable_prefix_caching")
    assert settings_of(underscored) == settings_of(dashed)
    assert settings_of(dashed) == {"max_num_seqs": 5, "enable_prefix_caching": False}


def test_underscores_in_values_stay() -> None:
    assert normalise(["--prompt=a_b", "c_d", "--", "--e_f"]) == [
        "--prompt=a_b",
        "c_d",
        "--",
        "--e_f",
    ]


def test_model_may_be_positional_or_a_flag_and_has_a_default() -> None:
    models = [config_of(parse("serve", *rest)).model for rest in ([], ["m"], ["--model", "m"])]
    assert models == ["smollm2-135m", "m", "m"]


@given(st.integers(0, 10**15))
def test_plain_sizes_are_what_they_say(value: int) -> None:
    assert size(str(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8k", 8192),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("-1", -1),
        ("0.5k", 512),
    ],
)
def test_sizes_take_units_of_1024(text: str, value: int) -> None:
    assert size(text) == value


def test_a_size_beyond_floating_point_is_a_size() -> None:
    assert size("9" * 400 + ".0g") == int("9" * 400) << 30


@pytest.mark.parametrize("text", ["", "k", "8kk", "1.5", "8x", "1e3", "-2k", "0x10"])
def test_sizes_refuse_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frob"],
        ["frob"],
        ["serve", "--frob"],
        ["serve", "--max-num-seq", "3"],
        ["serve", "a", "b"],
        ["serve", "--port", "http"],
        ["serve", "--shutdown-timeout", "nan"],
        ["serve", "--shutdown-timeout=-1"],
        ["serve", "--served-model-name", ""],
        ["serve", ""],
        ["chat", "--model", ""],
        ["serve", "--seed", "x"],
        ["serve", "--seed", "8k"],
        ["serve", "--seed", str(2**63)],
        ["generate"],
        ["generate", "--prompt", "x", "--max-tokens", "many"],
        ["bench", "throughput"],
        ["models", "forget"],
        ["models", "list", "smollm2-135m"],
        ["models", "clear", "x"],
        ["models", "fetch", ""],
        ["scenario", "list", "slot-137"],
        ["serve", "a", "--model", "b"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo")
    assert err.count("\n") == 1
    assert err.endswith("--help)\n")


def test_a_wrong_seed_is_told_what_a_seed_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_of(parse("serve", "--seed", str(2**63 - 1))) == {"seed": 2**63 - 1}
    assert exit_code("serve", "--seed", "x") == 2
    assert "'x' is no whole number from 0 to 2**63-1" in capsys.readouterr().err


def test_a_misspelt_flag_is_told_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("chat", "--max_num_seq", "3") == 2
    assert "did you mean --max-num-seqs?" in capsys.readouterr().err


def test_impossible_settings_are_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "--block-size", "3") == 1
    assert capsys.readouterr().err == (
        "octavo: block_size is 3, but must be a power of two, at most 65,536\n"
    )


@pytest.mark.parametrize("value", [2**40, 2**17])
def test_a_block_has_a_sane_size(value: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", "--block-size", str(value)) == 1
    assert "but must be a power of two, at most 65,536" in capsys.readouterr().err


def test_version_and_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("octavo ")
    assert exit_code() == 0
    assert "examples:" in capsys.readouterr().out
    assert exit_code("bench") == 2


@pytest.mark.parametrize("arguments", ["['--help']", "['serve', '--help']", "['serve', '--frob']"])
def test_help_and_mistakes_import_nothing_heavy(arguments: str) -> None:
    """What makes `octavo --help` answer at once: no array, server or model library is loaded."""
    script = (
        "import sys\nfrom octavo.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'uvicorn', 'starlette', 'jinja2', 'tokenizers', 'asyncio'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("imported")) == (0, 0), done.stderr
