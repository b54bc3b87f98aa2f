"""A process may have any of its standard streams closed: daemons, and what a shell starts with `<&-`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from tests.faults.conftest import Trace
from tllm_core.engines.echo import expected_tokens

SCRIPT = """
import json, sys, traceback
from tllm_core import GenerationExecutor, SamplingParams

said = []
try:
    for _ in range(2):  # what the first one opened has the numbers of the streams, where these are free
        with GenerationExecutor.create(engine="echo", engine_options={"world_size": 2}) as executor:
            said.append(executor.generate([1, 2], SamplingParams(max_tokens=4)).outputs[0].token_ids)
except BaseException:
    said.append(traceback.format_exc())
json.dump(said, open(sys.argv[1], "w"))
"""
COMBINATIONS = [chosen for count in range(4) for chosen in combinations(range(3), count)]


def closing(streams: tuple[int, ...]) -> Callable[[], None]:
    def close() -> None:
        for fd in streams:
            os.close(fd)

    return close


@pytest.mark.parametrize("streams", COMBINATIONS, ids=lambda streams: f"closed {list(streams)}")
def test_an_engine_starts_and_answers(streams: tuple[int, ...], tmp_path: Path, trace: Trace) -> None:
    answers, errors = tmp_path / "answers.json", tmp_path / "errors"
    script = tmp_path / "closed.py"
    script.write_text(SCRIPT)
    with errors.open("w") as stderr:
        code = subprocess.run(  # the streams are closed last of all, after those of `subprocess` are in place
            [sys.executable, str(script), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=closing(streams),
            timeout=60,
            check=False,
        ).returncode
    assert (code, errors.read_text()) == (0, "")
    assert json.loads(answers.read_text()) == [expected_tokens([1, 2], 4)] * 2
    assert trace.processes() == {}
