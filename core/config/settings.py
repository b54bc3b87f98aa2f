"""What can be set: one Struct per section of `tllm.toml`. Units are in the names."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from tllm_core.contracts.messages import Plain
from tllm_core.errors import ConfigError
from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.settings import WireSettings


class EngineChoice(Struct, frozen=True):
    """`[engine]`: an entry-point name or "module:Object", and the options of that engine (`[engine.NAME]`)."""

    name: str | None = None
    options: dict[str, Plain] = field(default_factory=dict)


class Choice(Struct, frozen=True):
    """`[transport]`, `[launcher]`: an entry-point name or "module:Class", and the options of that plugin."""

    name: str
    options: dict[str, Plain] = field(default_factory=dict)


class LedgerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[ledger]`. mailbox_bytes: what undelivered extras (logprobs and the like) of one request may hold before it alone ends."""

    mailbox_bytes: Annotated[int, Meta(ge=65536)] = 64 * 2**20


class PluginSettings(Struct, frozen=True):
    """`[plugins]`. enable: the cross-cutting plugins to load. options: `[plugins.NAME]` by name."""

    enable: tuple[str, ...] = ()
    options: dict[str, dict[str, Plain]] = field(default_factory=dict)


class AttachSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[attach]`. file: the 0600 file with the address and key of a world that somebody else started; None = start one.

    An empty text is None: it takes back what a file or the environment says.
    """

    file: str | None = None

    def __post_init__(self) -> None:
        if self.file == "":
            msgspec.structs.force_setattr(self, "file", None)


class FrontendsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[frontends]`: what `tllm worker` runs beside its engine. run: "module:function", called with an attached executor in
    each of `count` processes; None = nothing, as is an empty text. The worker ends once all of them have."""

    run: str | None = None
    count: Annotated[int, Meta(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
        if self.run == "":
            msgspec.structs.force_setattr(self, "run", None)
        elif self.run is not None:
            module, colon, function = self.run.partition(":")
            if not (colon and all(part.isidentifier() for part in (*module.split("."), function))):
                raise ConfigError(f'run must be "module:function", not {self.run!r}')


class Settings(Struct, frozen=True, kw_only=True):
    """All settings. `origins`: dotted key -> where its value came from, for every value that is no default."""

    engine: EngineChoice = EngineChoice()
    transport: Choice = Choice("zmq")
    launcher: Choice = Choice("spawn")
    wire: WireSettings = field(default_factory=WireSettings)
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    ledger: LedgerSettings = LedgerSettings()
    plugins: PluginSettings = PluginSettings()
    attach: AttachSettings = AttachSettings()
    frontends: FrontendsSettings = FrontendsSettings()
    origins: dict[str, str] = field(default_factory=dict)
