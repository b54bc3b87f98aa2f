"""torch's profiler as two control calls: one begins, the other ends and says where the trace is."""

import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tllm_core.errors import ControlError


class Profiling:
    """At most one profile at a time, of the thread that steps. All of it is held in memory until it is written: seconds
    of work, not hours."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._profile: profile | None = None
        self._directory = Path()
        self._count = 0

    @property
    def running(self) -> bool:
        return self._profile is not None

    def start(self, directory: str) -> str:
        """Returns the directory, which is made if need be. Raises ControlError where it can't be written or one runs."""
        if self._profile is not None:
            raise ControlError(f"a profile into {self._directory} runs already; call stop_profile first")
        self._directory = _writable(Path(directory).expanduser().absolute())
        started = profile(activities=self._activities)
        started.start()
        self._profile = started
        return str(self._directory)

    def stop(self) -> str:
        """Returns the path of a Chrome trace, which is complete. Raises ControlError where none runs or it can't be written."""
        running, self._profile = self._profile, None
        if running is None:
            raise ControlError("no profile runs; call start_profile(directory) first")
        running.stop()
        self._count += 1
        path = self._directory / f"tp-{os.getpid()}-{self._count}.json"
        draft = path.with_suffix(".part.json")
        try:
            running.export_chrome_trace(str(draft))
            draft.replace(path)
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            raise ControlError(f"the trace could not be written to {path}, and is lost: {error}") from None
        return str(path)

    def close(self) -> None:
        """Ends one that runs; nothing is written."""
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise ControlError(f"no trace can be written to {directory}: {error.strerror}") from None
