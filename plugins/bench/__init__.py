"""`tllm bench`: what the boundary and the engine reach, beside their limits on the same machine in the same run."""

import argparse
import importlib
from typing import Any

from tllm_core.contracts.hookspecs import hookimpl

BENCHMARKS = {
    "boundary": "tokens per second and latency from an engine's process to its consumers",
    "death": "how soon every stream hears that its engine is gone",
    "engine": "prefill and decode of a real model",
}
"""Name -> help. Each is a module here with `add_arguments(parser)` and `run(arguments) -> int`."""


class _Benchmark(argparse.ArgumentParser):
    """Takes its options from its module only when it is chosen: what a benchmark needs is heavy, and help is not."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found = importlib.import_module(self.module)
        found.add_arguments(self)
        self.set_defaults(run=found.run)
        return super().parse_known_args(args, namespace)


@hookimpl
def tllm_add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    text = "measure the boundary, a death, or the engine beside its limits"
    parser = commands.add_parser("bench", help=text, description=text.capitalize() + ".")
    benchmarks = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Benchmark)
    for name, text in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
        benchmark.module = f"{__name__}.{name}"
