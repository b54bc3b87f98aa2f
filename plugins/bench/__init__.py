"""`tllm bench`: what the boundary and the engine reach, beside their limits on the same machine in the same run."""

import argparse
import importlib
from typing import Any

from tllm_core.contracts.hookspecs import hookimpl

BENCHMARKS = {
    "boundary": "tokens per second and latency from an engine's process to its consumers",
    "engine": "prefill and decode of a real model",
}
"""Name -> help. Each is a module here with `add_arguments(parser)` and `run(arguments) -> int`."""


@hookimpl
def tllm_add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    text = "measure the boundary or the engine beside their limits"
    parser = commands.add_parser("bench", help=text, description=text.capitalize() + ".")
    benchmarks = parser.add_subparsers(metavar="WHAT", required=True)
    for name, text in BENCHMARKS.items():
        module = importlib.import_module(f"{__name__}.{name}")
        benchmark = benchmarks.add_parser(name, help=text, description=text.capitalize() + ".")
        module.add_arguments(benchmark)
        benchmark.set_defaults(run=module.run)
