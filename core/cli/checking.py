"""`tllm check`: settings, start, round trip; says how far it came."""

import argparse
import time

from tllm_core.cli.arguments import add_common, settings_of
from tllm_core.cli.terminal import running
from tllm_core.contracts.messages import SamplingParams
from tllm_core.registry import Registry


def add_check(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tllm check`."""
    add_common(parser)


def check(arguments: argparse.Namespace) -> int:
    """Starts what is set, sends one request through it, and prints what each step took."""
    from tllm_core.config import unused_tables

    registry = Registry()
    settings = settings_of(arguments, registry, needs_engine=True)
    unused = {} if settings.attach.file else unused_tables(settings)
    if settings.attach.file is None:
        from tllm_core.plan import Plan

        Plan.of(settings, registry)  # a pair that can't work is not "ok" first
        chosen = ", ".join(f"{name} {getattr(settings, name).name}" for name in ("engine", "transport", "launcher"))
    else:
        chosen = f"attach to {settings.attach.file}"
    print(f"settings    ok: {chosen}", flush=True)
    for table, origin in unused.items():
        print(f"            [{table}] ({origin}) is not used: {_why(table)}", flush=True)
    began = time.monotonic()
    with running(settings, lines=True) as executor:
        ready = time.monotonic()
        print(f"connection  ok: {executor.info.model} is ready after {ready - began:.2f} s", flush=True)
        result = executor.generate_async([1], SamplingParams(max_tokens=1)).result()
        took_ms = 1000 * (time.monotonic() - ready)
        print(f"round trip  ok: {len(result.outputs[0].token_ids)} token in {took_ms:.1f} ms")
    return 0


def _why(table: str) -> str:
    section = table.partition(".")[0]
    return "plugins.enable does not name it" if section == "plugins" else f"another {section} is chosen"
