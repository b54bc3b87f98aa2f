"""All cases of an engine in one class."""

from __future__ import annotations

from tllm_core.conformance.engine.aborts import AbortCases
from tllm_core.conformance.engine.behind import ExecutorCases
from tllm_core.conformance.engine.closing import CloseCases
from tllm_core.conformance.engine.controls import ControlCases
from tllm_core.conformance.engine.endings import EndCases
from tllm_core.conformance.engine.limits import LimitCases
from tllm_core.conformance.engine.logprobs import LogprobCases
from tllm_core.conformance.engine.pace import PaceCases
from tllm_core.conformance.engine.tokens import TokenCases


# pytest runs the cases of the last base first.
class EngineConformance(
    ExecutorCases,
    CloseCases,
    ControlCases,
    PaceCases,
    AbortCases,
    LimitCases,
    LogprobCases,
    EndCases,
    TokenCases,
):
    """Subclass it as `Test...` and say which engine; every case is a plain pytest test.

    engine: its entry-point name, "module:SPEC", or the EngineSpec. settings: as in `[engine.NAME]` of a config file; choose a
    small model, and a max_seq_len that can be run into. Where they are known only when tests run, set them on the class in
    `setup_class`.
    prompts: token id lists that make sense for it; made up where there are none. The answers of one or more should reach
    the model's own end, or that it ends there is not checked. max_tokens: of most requests, 4 at least.
    bad_settings: with which it can't start. many_ranks: settings over `settings` that make it several ranks.

    The engine runs in this process, driven directly as a rank's worker does and behind an executor with `inproc` and
    `inline`; where it claims MANY_RANKS, also in processes of its own with `zmq` and `spawn`.
    """
