"""What a process holds in memory: weights, K/V, and little more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from beds.backends import TEST_BACKENDS

if "cpu" not in TEST_BACKENDS:
    pytest.skip("no cpu backend is asked for", allow_module_level=True)

MORE = 120 << 20
"""Bytes besides weights and pool: the interpreter, its libraries, the tokenizer, scratch memory."""
NUM_BLOCKS = 64

START = f"""
import json, re, sys
from pathlib import Path
from octavo import LLM, SamplingParams
from octavo.kernels.cpu import packed
llm = LLM(sys.argv[1], num_kv_blocks={NUM_BLOCKS}, max_model_len=1024, packed_cache=sys.argv[2])
llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
packed.wait()
report = llm._engine.core.executor.describe()
sizes = [int(re.search(r"([\\d,]+) MiB", report[key])[1].replace(",", "")) << 20
         for key in ("weights", "KV pool")]
status = Path("/proc/self/status").read_text()
resident = int(re.search(r"VmRSS:\\s+(\\d+) kB", status)[1]) << 10
print(json.dumps([*sizes, resident, report["packed weights"]]))
"""


@pytest.mark.model
@pytest.mark.slow
def test_a_process_holds_weights_and_kv_and_little_more(model_file: Path, tmp_path: Path) -> None:
    """However it started: packing without a cache, filling it, mapping or copying from it."""
    environment = {**os.environ, "OCTAVO_PACKED": str(tmp_path)}
    reports = []
    for way in ("off", "auto", "map", "copy"):
        command = [sys.executable, "-c", START, str(model_file), way]
        output = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
        weights, pool, resident, report = json.loads(output)
        assert weights > 80 << 20
        assert resident >= weights, "weights that are not resident are not the model"
        more = resident - weights - pool
        assert more <= MORE, f"{way}: {more >> 20} MiB more than weights and pool ({report})"
        reports.append(report.split()[2] if way != "off" else report)
    assert reports == ["not kept", "packed,", "mapped", "copied"]
