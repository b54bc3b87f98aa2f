"""The tp engine in a process of its own: control calls and KV events as frontends see them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tllm_core import ControlError, GenerationExecutor, RequestError, SamplingParams
from tllm_core.config import load_settings

MANY = SamplingParams(max_tokens=20, ignore_eos=True)


def test_no_values_of_a_request_use_up_the_error_budget(model_dir: Path) -> None:
    options = {"model": str(model_dir), "threads": 1, "num_blocks": 64}
    settings = load_settings(overrides={"engine.name": "tp", "engine.options": options, "liveness.error_budget": 1})
    with GenerationExecutor.create(settings) as executor:
        other = executor.generate_async([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        for penalty in (5e-324, 1e-300, 100.0):
            executor.generate([*range(320)][1:200], SamplingParams(max_tokens=3, repetition_penalty=penalty))
        nothing: list[tuple[str, dict[str, Any]]] = [
            ("allowed_token_ids", {"allowed_token_ids": (5,), "bad_token_sequences": ((5,),)}),
            ("bad_token_sequences", {"bad_token_sequences": tuple((token,) for token in range(320))}),
            ("min_tokens", {"min_tokens": 3, "stop_token_ids": tuple(range(320))}),
        ]
        for field, values in nothing:
            with pytest.raises(RequestError, match="exclude all of them") as caught:
                executor.generate([5, 6, 7], SamplingParams(max_tokens=3, **values))
            assert caught.value.field == field
        assert len(other.result(60).outputs[0].token_ids) == 200  # type: ignore[union-attr]
        assert executor.check_health()


def test_frontends_each_see_all_events_and_one_engine(model_dir: Path, tmp_path: Path) -> None:
    options = {"model": str(model_dir), "threads": 1, "num_blocks": 64}
    with GenerationExecutor.create(engine="tp", engine_options=options) as owner:
        owner.write_attach_file(tmp_path / "engine.json")
        with GenerationExecutor.attach(tmp_path / "engine.json") as attached:
            expected = owner.generate([5, 6, 7], MANY).outputs[0].token_ids  # type: ignore[union-attr]
            seen = owner.kv_events()
            assert [event.kind for event in seen.events] == ["stored"], "16 of its 22 tokens fill a block"
            assert asyncio.run(attached.akv_events()) == seen
            assert owner.kv_events().events == ()
            assert owner.kv_events(since=0) == seen
            assert owner.stats().generated_tokens == attached.stats().generated_tokens == 20

            owner.control("pause")
            result = attached.generate_async([5, 6, 7], MANY)
            with pytest.raises(TimeoutError):
                result.result(0.3)
            with pytest.raises(ControlError, match="has 1 request, of all frontends together"):
                owner.control("sleep", 2)
            owner.control("resume")
            assert result.result(30).outputs[0].token_ids == expected

            owner.control("start_profile", str(tmp_path / "traces"))
            owner.control("sleep", 2)
            with pytest.raises(RequestError, match="sleeps"):
                attached.generate([5, 6, 7], MANY)
            attached.control("wakeup")
            assert attached.generate([5, 6, 7], MANY).outputs[0].token_ids == expected  # type: ignore[union-attr]
            (path,) = owner.control("stop_profile")
            assert json.loads(Path(path).read_text())["traceEvents"]
            assert "cleared" in {event.kind for event in attached.kv_events().events}
