"""All cases of a launcher in one class."""

from tllm_core.conformance.launcher.attached import AttachCases
from tllm_core.conformance.launcher.deaths import DeathCases
from tllm_core.conformance.launcher.ends import EndCases
from tllm_core.conformance.launcher.failures import FailureCases
from tllm_core.conformance.launcher.owners import OwnerCases
from tllm_core.conformance.launcher.starts import StartCases


class LauncherConformance(AttachCases, OwnerCases, EndCases, DeathCases, FailureCases, StartCases):
    """Derive from it as `Test...`, and name the launcher:

        class TestMine(LauncherConformance):
            launcher = "mine"
            settings = {"queue": "tests"}

    launcher: its entry-point name, "module:Class", or the class. settings: as in `[launcher.NAME]` of a config file.
    ranks: of the cases about several; 1 for a launcher that starts no more. impatient: settings over `settings` with which a
    start is given up after about two seconds; made from `ready_timeout_s` where the launcher has that. transport,
    transport_options: over which its worlds are reached; by default zmq, or inproc for a launcher that needs nothing.

    The engine is `echo`. Cases about processes are skipped for a launcher whose worlds are this process, by their own word.
    """
