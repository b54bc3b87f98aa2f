"""Echo engines that take, refuse or abort requests wrongly; one fault each."""

from __future__ import annotations

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_engines import Broken
from tllm_core.contracts.messages import ErrorReport, Output, SamplingParams, Step
from tllm_core.engines.echo.engine import EchoEngine
from tllm_core.engines.echo.spec import SPEC
from tllm_core.errors import RequestError

# --------------------------------------------------------------------------------------------------------------- limits


@caught_by(
    "TestEcho", "test_what_is_not_in_supports_is_refused_by_name", "the engine took a request that it can't serve"
)
class IgnoresWhatItDoesNotKnow(Broken):
    """Takes a request with fields that it does not support, as if they were not there."""

    def submit(self, request):
        known = {name: getattr(request.sampling, name) for name in ("n", "max_tokens", "ignore_eos")}
        super().submit(structs.replace(request, sampling=SamplingParams(**known)))


@caught_by("TestEcho", "test_the_longest_request_that_fits_is_served_and_no_longer_one", "the engine took a request")
class IsOffByOne(Broken):
    """Takes one token more than it advertises."""

    def start(self, context):
        info = super().start(context)
        return structs.replace(info, max_seq_len=info.max_seq_len - 1)


@caught_by("TestEcho", "test_bad_requests_end_alone", "submit raised ValueError")
class DiesOfABadRequest(Broken):
    """An empty prompt raises what ends the engine."""

    def submit(self, request):
        try:
            super().submit(request)
        except RequestError as error:
            raise ValueError(str(error)) from None


@caught_by("TestEcho", "test_bad_requests_end_alone", "the engine stalls")
class BlamesAnother(Broken):
    """A bad request's error is told of the one that runs."""

    def submit(self, request):
        try:
            super().submit(request)
        except RequestError as error:
            self.errors = [*getattr(self, "errors", ()), str(error)]

    def step(self):
        step = super().step()
        if getattr(self, "errors", ()) and step.outputs:
            last = step.outputs[-1]
            self.abort(last.request_id)
            blamed = Output(request_id=last.request_id, error=ErrorReport(self.errors.pop()))
            return Step([*step.outputs[:-1], blamed], step.again)
        return step


# --------------------------------------------------------------------------------------------------------------- aborts


@caught_by(
    "TestEcho",
    "test_an_abort_in_any_phase_delivers_nothing_more_and_frees_everything",
    "was aborted, and the engine",
)
class DeliversAfterTheAbort(Broken):
    """An abort takes effect one step late."""

    def abort(self, request_id):
        if request_id in self._live:
            self.late = [*getattr(self, "late", ()), Output(request_id=request_id, token_ids=(1,))]
        super().abort(request_id)

    def step(self):
        step, late = super().step(), getattr(self, "late", [])
        self.late = []
        return Step([*late, *step.outputs], step.again)


@caught_by("TestEcho", "test_a_crowd_that_is_aborted_at_once_leaves_nothing", "blocks are used, and were")
class NeverFrees(Broken):
    """What an aborted request held is held for ever."""

    lost = 0

    def abort(self, request_id):
        self.lost += request_id in self._live
        super().abort(request_id)

    def stats(self):
        stats = super().stats()
        return structs.replace(stats, kv_blocks_total=10**6, kv_blocks_used=stats.running + self.lost)


@caught_by("TestEcho", "test_an_abort_ends_all_sequences_of_a_request", "still delivers for it")
class AbortsOneSequence(Broken):
    """An abort takes one sequence of several out of the batch."""

    def _stop_sequences(self, live):
        self._running.pop(live.request.request_id * 1024, None)

    def _finish(self, output):
        if output.request_id in self._live:
            super()._finish(output)
        else:
            del self._running[output.request_id * 1024 + output.index]


@caught_by("TestEcho", "test_aborting_what_is_unknown_or_over_does_nothing", "abort raised KeyError")
class TripsOverUnknownIds(Broken):
    """An abort of what is over raises."""

    def abort(self, request_id):
        self._live[request_id]
        super().abort(request_id)


@caught_by("TestEcho", "test_memory_is_flat_over_many_requests", "blocks that were kept per request")
class RemembersEveryRequest(EchoEngine):
    """Keeps a list of what it was asked."""

    spec = structs.replace(SPEC, name="broken", load=f"{__name__}:RemembersEveryRequest")

    def submit(self, request):
        super().submit(request)
        self.history = getattr(self, "history", [])
        self.history.append([request])
