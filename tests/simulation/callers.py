"""What the callers of a frontend do, at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .model import DEADLY, FAILING, REJECTED, WELL
from .violation import Violation

if TYPE_CHECKING:
    from .composition import Simulation
    from .frontends import FrontendProcess
    from .tickets import Ticket


def submit(sim: Simulation, process: FrontendProcess) -> None:
    roll = sim.dice.random()
    kind = WELL if roll < 0.85 else REJECTED if roll < 0.92 else FAILING if roll < 0.995 else DEADLY
    process.submit(kind)


def submit_many(sim: Simulation, process: FrontendProcess) -> None:
    for _ in range(sim.dice.randrange(2, 6)):
        submit(sim, process)


def abort_one(sim: Simulation, process: FrontendProcess) -> None:
    if process.open_tickets:
        ticket = sim.dice.choice(process.open_tickets)
        if ticket.box.outcome is None:
            process.abort(ticket)
            process.frontend.abort(ticket.box.client_id)  # twice is a quiet no-op


def abort_young(sim: Simulation, process: FrontendProcess) -> None:
    """At once after its submit: it must not overtake it."""
    ticket: Ticket | None = process.submit()
    if ticket is not None and ticket.box.outcome is None:
        process.abort(ticket)


def abort_unknown(sim: Simulation, process: FrontendProcess) -> None:
    """I6: a quiet no-op."""
    sent = process.port.sent
    client_id = process.ended[-1].box.client_id if process.ended else 12345
    process.frontend.abort(client_id)
    if process.port.sent != sent:
        raise Violation("I6", "the abort of a request that had ended was sent")


def abort_all(sim: Simulation, process: FrontendProcess) -> None:
    for ticket in process.open_tickets:
        if ticket.box.outcome is None:
            process.abort(ticket)


def lose_consumer(sim: Simulation, process: FrontendProcess) -> None:
    if process.open_tickets:
        process.lose_consumer(sim.dice.choice(process.open_tickets))


def control(sim: Simulation, process: FrontendProcess) -> None:
    process.call(
        sim.dice.choice(("echo", "fail", "stats", "unknown", *(() if sim.mended else ("pause", "resume", "resume"))))
    )


def leave(sim: Simulation, process: FrontendProcess) -> None:
    """A frontend leaves, and perhaps another comes; only rarely the owner, which ends the world."""
    if process.owner and sim.dice.random() < 0.9:
        return
    process.close()
    if not process.owner and sim.chance(0.7):
        sim.start_frontend()


CALLS = (
    *(submit,) * 8,
    *(submit_many,) * 4,
    *(abort_one,) * 3,
    abort_young,
    abort_unknown,
    abort_all,
    lose_consumer,
    control,
    leave,
)
