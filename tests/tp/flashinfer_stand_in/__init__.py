"""A FlashInfer without a GPU: checks every call as strictly as the package and its kernels do, then computes the definition.

Arguments are bound against the signatures of a real version (the JSON files, written by tools/flashinfer_signatures.py).
What is wrong raises `Refused`, also where the real kernels would only compute nonsense. "The device" is that of the workspace
or of the activations: the CPU, where results are computed, or torch's meta device, where places alone are checked.
"""

from tests.tp.flashinfer_stand_in.rules import Refused
from tests.tp.flashinfer_stand_in.stand_in import VERSIONS, FlashInferStandIn
from tests.tp.flashinfer_stand_in.tape import Tape

__all__ = ["VERSIONS", "FlashInferStandIn", "Refused", "Tape"]
