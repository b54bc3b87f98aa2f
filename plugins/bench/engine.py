"""`tllm bench engine`: decode and prefill speed of the tp engine beside transformers and the bare matrix products.

All of it in one run, in alternating rounds, because absolutes of different runs on a shared machine can't be compared.
"""

import argparse
import json
import sys
from collections.abc import Iterator

from msgspec import Struct, field

from tllm_core.errors import ConfigError
from tllm_core.plugins.bench.report import usable_cores
from tllm_core.registry import Registry, load_object

PREFILL_TOKENS = 512


class Plan(Struct, frozen=True):
    """What is measured. batches: sequences that decode at once."""

    model: str
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    threads: int | None
    rounds: int
    compare: bool
    device: str
    attention: str


class Case(Struct):
    """One workload and the best tokens/s of each contender: ours, generate, continuous_batching and limits."""

    name: str
    batch: int
    best: dict[str, float] = field(default_factory=dict)

    def note(self, contender: str, tokens_per_s: float) -> None:
        self.best[contender] = max(tokens_per_s, self.best.get(contender, 0.0))

    def ratios(self) -> dict[str, float]:
        ours = self.best["ours"]
        return {name: ours / speed for name, speed in self.best.items() if name != "ours" and speed}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tllm bench engine`."""
    parser.add_argument("--model", default="smollm2-135m", help="as the tp engine's option of that name")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or as torch writes it")
    parser.add_argument("--attention", default="auto", choices=("auto", "torch", "flashinfer"), help="of the tp engine")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--batch", default=None, help="sequences that decode at once, comma separated: 1,8,16; under pressure one: 8"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch; all cores by default")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many is reported, under pressure medians")
    parser.add_argument("--compare", choices=("transformers",), default=None)
    parser.add_argument(
        "--under-pressure",
        action="store_true",
        help="measure instead what running streams notice of long prompts, slow and broken requests, the prefix cache, and ranks",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code. Raises ConfigError for options or a model that can't be used."""
    plan = _plan(arguments)
    if arguments.under_pressure:
        return _run_under_pressure(plan, arguments.json)
    cases = measure(plan)
    if arguments.json:
        print(json.dumps({"plan": _plain(plan), "cases": [_report(case) for case in cases]}, indent=2))
    else:
        print("\n".join(_table(plan, cases)))
    return 0


def measure(plan: Plan) -> list[Case]:
    """Runs every contender on every case, `plan.rounds` times in turn."""
    # The engine first: it sets how torch's threads wait, which all contenders then share.
    load_object(Registry().engine("tp").load)
    from tllm_core.plugins.bench.engine_contenders import Contender, Ours, Transformers
    from tllm_core.plugins.bench.engine_limits import BandwidthLimit, GemmLimit

    decode = [Case(f"decode batch {batch}", batch) for batch in plan.batches]
    prefill = Case(f"prefill {PREFILL_TOKENS}", 1)
    device = plan.device
    ours = Ours(plan.model, plan.dtype, plan.threads, max(plan.batches), device, plan.attention)
    try:
        contenders: list[Contender] = [ours, GemmLimit(ours.model_dir, plan.dtype, device)]
        if device != "cpu":
            contenders.append(BandwidthLimit(ours.model_dir, plan.dtype, device))
        if plan.compare:
            contenders += Transformers.both(ours.model_dir, plan.dtype, device)
        for number in range(plan.rounds):
            for case, contender in ((case, contender) for case in decode for contender in contenders):
                _say(f"round {number + 1}/{plan.rounds}: {case.name}, {contender.name}")
                case.note(contender.name, contender.decode(case.batch, plan.prompt_tokens, plan.new_tokens))
            for contender in contenders:
                _say(f"round {number + 1}/{plan.rounds}: {prefill.name}, {contender.name}")
                prefill.note(contender.name, contender.prefill(PREFILL_TOKENS))
    finally:
        ours.close()
    _say("")
    return [*decode, prefill]


def _run_under_pressure(plan: Plan, as_json: bool) -> int:
    from tllm_core.plugins.bench import engine_pressure, engine_pressure_report

    (streams,) = plan.batches
    pressure = engine_pressure.Plan(
        model=plan.model,
        dtype=plan.dtype,
        device=plan.device,
        attention=plan.attention,
        threads=plan.threads or usable_cores(),
        streams=streams,
        prompt_tokens=plan.prompt_tokens,
        new_tokens=plan.new_tokens,
        rounds=plan.rounds,
        say=_say,
    )
    told = engine_pressure_report.report(pressure, engine_pressure.measure(pressure))
    print(json.dumps(told, indent=2) if as_json else "\n".join(engine_pressure_report.table(told)))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    try:
        typed = arguments.batch or ("8" if arguments.under_pressure else "1,8,16")
        batches = tuple(int(part) for part in typed.split(","))
    except ValueError:
        raise ConfigError(f"--batch must be numbers separated by commas, not {arguments.batch!r}") from None
    least = min(*batches, arguments.prompt_tokens, arguments.rounds, arguments.threads or 1)
    if least < 1 or arguments.new_tokens < 4:
        raise ConfigError(
            "--batch, --prompt-tokens, --rounds and --threads must be at least 1, --new-tokens at least 4"
        )
    if arguments.under_pressure and (len(batches) > 1 or arguments.compare):
        raise ConfigError("--under-pressure takes one number as --batch, and no --compare")
    return Plan(
        model=arguments.model,
        dtype=arguments.dtype,
        batches=batches,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        threads=arguments.threads,
        rounds=arguments.rounds,
        compare=arguments.compare is not None,
        device=arguments.device,
        attention=arguments.attention,
    )


def _plain(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def _report(case: Case) -> dict[str, object]:
    return {
        "name": case.name,
        "batch": case.batch,
        "tokens_per_s": {name: round(speed, 1) for name, speed in case.best.items()},
        "ours_to": {name: round(ratio, 2) for name, ratio in case.ratios().items()},
    }


def _table(plan: Plan, cases: list[Case]) -> Iterator[str]:
    names = list(cases[0].best)
    workload = f"{plan.prompt_tokens}+{plan.new_tokens} tokens, best of {plan.rounds}"
    yield f"{plan.model}, {plan.dtype}, {workload}; tokens/s (ours to it)"
    yield " ".join([f"{'':16}", *(f"{name:>24}" for name in names)])
    for case in cases:
        ratios = case.ratios()
        cells = [
            f"{speed:.1f}" + (f" ({ratios[name]:.2f})" if name in ratios else "") for name, speed in case.best.items()
        ]
        yield " ".join([f"{case.name:16}", *(f"{cell:>24}" for cell in cells)])


def _say(line: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
