"""What a run of a suite found, as a page that a person can read and as JSON. Holds no settings, which may be secret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Literal

import msgspec
from msgspec import Struct, field

Result = Literal["pass", "fail", "not claimed", "not checked", "does not apply"]
"""not claimed: a capability that the subject does not declare. not checked: something it needs is not on this machine."""

SIGNS: dict[Result, str] = {
    "pass": "good",
    "fail": "bad",
    "not claimed": "none",
    "not checked": "open",
    "does not apply": "none",
}


class Outcome(Struct, frozen=True):
    """One case. `words`: why it failed or was passed over, in a few lines; `details`: the failure whole, with its traceback."""

    case: str
    result: Result
    seconds: float
    invariants: tuple[str, ...] = ()
    needs: str | None = None
    promise: str = ""
    blame: str = ""
    words: str = ""
    details: str = ""


class Report(Struct, frozen=True):
    """One run. version: of `distribution`, which the subject came with; both empty where it is no entry point."""

    kind: str
    name: str
    distribution: str
    version: str
    core_version: str
    python: str
    platform: str
    finished_at: str
    capabilities: tuple[str, ...]
    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, result: Result) -> int:
        """How many cases ended that way."""
        return self.counts()[result]

    def counts(self) -> Counter[str]:
        return Counter(outcome.result for outcome in self.outcomes)

    @property
    def holds(self) -> bool:
        """Nothing failed, and something was checked."""
        return not self.count("fail") and self.count("pass") > 0

    def summary(self) -> str:
        """One line, as for a badge."""
        counts = self.counts()
        numbers = ", ".join(f"{counts[result]} {_plural(result)}" for result in SIGNS if counts[result])
        return f"{self.kind} {self.name} {self.version}".rstrip() + f" on tllm-core {self.core_version}: {numbers}"

    def to_json(self) -> bytes:
        """The report with its counts, indented."""
        told = {**msgspec.to_builtins(self), "counts": dict(self.counts()), "holds": self.holds}
        return msgspec.json.format(msgspec.json.encode(told)) + b"\n"

    def to_html(self) -> str:
        """One page that needs nothing else."""
        return PAGE.format(
            title=escape(f"{self.kind} {self.name}"),
            sign="good" if self.holds else "bad",
            verdict="conforms" if self.holds else "does not conform",
            facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self._facts()),
            counts="".join(
                f'<span class="{SIGNS[result]}"><b>{number}</b> {escape(_plural(result))}</span>'
                for result in SIGNS
                if (number := self.count(result))
            ),
            rows="".join(_row(outcome) for outcome in _worst_first(self.outcomes)),
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "From", f"{self.distribution} {self.version}".strip() or "no installed distribution"
        yield "Checked with", f"tllm-core {self.core_version}, Python {self.python}, {self.platform}"
        yield "Claims", ", ".join(self.capabilities) or "nothing"
        yield "Finished", self.finished_at
        yield "Took", f"{sum(outcome.seconds for outcome in self.outcomes):.0f} s"


def _plural(result: str) -> str:
    return {"pass": "passed", "fail": "failed", "does not apply": "not applicable"}.get(result, result)


def _worst_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    order = ("fail", "not checked", "pass", "not claimed", "does not apply")
    return sorted(outcomes, key=lambda outcome: order.index(outcome.result))


def _row(outcome: Outcome) -> str:
    words = f'<p class="words">{escape(outcome.words)}</p>' if outcome.words else ""
    if outcome.result == "fail":
        words = (
            f"<p>This most likely means: {escape(outcome.blame)}</p><pre>{escape(outcome.words)}</pre>"
            f"<details><summary>Where</summary><pre>{escape(outcome.details)}</pre></details>"
        )
    return (
        f'<tr><td><span class="{SIGNS[outcome.result]}">{outcome.result}</span></td>'
        f"<td>{escape(' '.join(outcome.invariants))}</td>"
        f"<td><code>{escape(outcome.case)}</code><p>{escape(outcome.promise)}</p>{words}</td>"
        f'<td class="number">{outcome.seconds:.1f} s</td></tr>\n'
    )


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Conformance of {title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --open: #9a6700; --none: #6e7781; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }}
h1 span, .counts span, td span {{ color: #fff; border-radius: .4rem; padding: .1rem .5rem; white-space: nowrap; }}
.counts span {{ margin-right: .5rem; }} td span {{ font-size: .85rem; }}
.good {{ background: var(--good); }} .bad {{ background: var(--bad); }}
.open {{ background: var(--open); }} .none {{ background: var(--none); }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }} dt {{ color: var(--none); }} dd {{ margin: 0; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .5rem; border-top: 1px solid var(--line); }}
td p {{ margin: .2rem 0; }} .words {{ color: var(--none); }} .number {{ text-align: right; white-space: nowrap; }}
pre {{ overflow-x: auto; white-space: pre-wrap; border-left: 3px solid var(--bad); padding-left: .7rem; }}
</style>
</head>
<body>
<h1>{title} <span class="{sign}">{verdict}</span></h1>
<p class="counts">{counts}</p>
<dl>{facts}</dl>
<table>
<thead><tr><th>Result</th><th>Invariants</th><th>Promise</th><th class="number">Time</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
</body>
</html>
"""
