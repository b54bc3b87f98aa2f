"""What `tllm bench engine` measures: the tp engine and transformers' two ways to generate. Their limits: engine_limits.py."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

import torch

from tllm_core.contracts.interfaces import Engine, EngineContext
from tllm_core.contracts.messages import EngineRequest, SamplingParams, TokenIds
from tllm_core.errors import ConfigError
from tllm_core.plugins.bench.engine_streams import Prompts, shared_window
from tllm_core.registry import Registry, load_object

_PAGE = 16


class Contender(ABC):
    """Both methods return tokens per second of one round, on prompts that were never seen before."""

    name: str

    @abstractmethod
    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """While all sequences of the batch decode: prefill is not counted."""

    @abstractmethod
    def prefill(self, tokens: int) -> float:
        """From one prompt to its first token."""


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ours(Contender):
    """The tp engine, driven in this process as a worker drives it."""

    name = "ours"

    def __init__(
        self, model: str, dtype: str, threads: int | None, max_batch: int, device: str = "cpu", attention: str = "auto"
    ) -> None:
        spec = Registry().engine("tp")
        settings = spec.settings_type(
            model=model,
            dtype=dtype,
            threads=threads,
            max_num_seqs=max(64, max_batch),
            max_batched_tokens=max(512, max_batch),
            device=device,
            attention=attention,
        )
        self._engine: Engine = load_object(spec.load)(settings)
        try:
            info = self._engine.start(_Alone())
        except BaseException:
            self._engine.close()
            raise
        if info.model_dir is None or info.vocab_size is None:
            raise ConfigError(f"the engine does not say where its model {model} is")
        self.model_dir = info.model_dir
        self._prompts = Prompts(info.vocab_size, seed=1)
        self._ids = iter(range(1, 1 << 62))

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        return shared_window(self._run(self._prompts.take(batch, prompt_tokens), new_tokens))

    def prefill(self, tokens: int) -> float:
        prompts = self._prompts.take(1, tokens)
        began = time.perf_counter()
        ((first,),) = self._run(prompts, 1)
        return tokens / (first - began)

    def close(self) -> None:
        self._engine.close()

    def _run(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """When each prompt's tokens were there."""
        times: dict[int, list[float]] = defaultdict(list)
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        for prompt in prompts:
            request = EngineRequest(request_id=next(self._ids), prompt_token_ids=TokenIds.of(prompt), sampling=sampling)
            self._engine.submit(request)
        again = True
        while again:
            step = self._engine.step()
            again, now = step.again, time.perf_counter()
            for output in step.outputs:
                if output.error is not None:
                    raise ConfigError(f"the engine failed a request of the benchmark: {output.error.message}")
                times[output.request_id] += [now] * len(output.token_ids)
        return list(times.values())


class _Alone(EngineContext):
    """A world of this process alone."""

    rank, world_size, rendezvous = 0, 1, None

    def wake(self) -> None:
        """Nothing sleeps here."""

    def phase(self, name: str, done: float | None = None) -> None:
        """Nobody watches."""

    def adopt(self, pid: int) -> None:
        """Nobody watches."""


class Transformers(Contender):
    """`generate` on a padded batch, with its default cache."""

    name = "generate"

    @staticmethod
    def both(model_dir: str, dtype: str, device: str = "cpu") -> list[Contender]:
        """This and continuous batching, with a model each: the latter changes the attention of its own."""
        return [Transformers(model_dir, dtype, device), ContinuousBatching(model_dir, dtype, device)]

    def __init__(self, model_dir: str, dtype: str, device: str = "cpu") -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(f"--compare transformers needs it: pip install 'tllm-core[engine]' ({error})") from None
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self._device = torch.device(device)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = self._model.to(self._device).eval()
        self._model.generation_config.eos_token_id = None
        self._prompts = Prompts(self._model.config.vocab_size, seed=2)

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        times = self._run(self._prompts.take(batch, prompt_tokens), new_tokens)
        return batch * (len(times) - 1) / (times[-1] - times[0])

    def prefill(self, tokens: int) -> float:
        prompts = self._prompts.take(1, tokens)
        began = time.perf_counter()
        (first,) = self._run(prompts, 1)
        return tokens / (first - began)

    def _run(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """When each step of the whole batch ended."""
        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            synchronize(self._device)
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        ids = torch.tensor(prompts, device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_greedy(new_tokens),
                stopping_criteria=[note],
            )
        return times


class ContinuousBatching(Transformers):
    """`generate_batch`, transformers' own scheduler and paged cache."""

    name = "continuous_batching"

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        return shared_window(self._batch(self._prompts.take(batch, prompt_tokens), new_tokens))

    def prefill(self, tokens: int) -> float:
        """From the request's admission: starting its thread and cache is not counted."""
        prompts = self._prompts.take(1, tokens)
        return tokens / self._first_token_s(prompts)

    def _batch(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        return [list(output.timestamps) for output in self._outputs(prompts, new_tokens)]

    def _first_token_s(self, prompts: list[list[int]]) -> float:
        (output,) = self._outputs(prompts, 1)
        return float(output.timestamps[0] - output.created_time)

    def _outputs(self, prompts: list[list[int]], new_tokens: int) -> list[Any]:
        from transformers import ContinuousBatchingConfig

        longest = max(map(len, prompts)) + new_tokens
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=len(prompts) * (longest // _PAGE + 2) + 16,
            max_batch_tokens=1024,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        outputs = self._model.generate_batch(
            prompts,
            generation_config=_greedy(new_tokens),
            continuous_batching_config=config,
            record_timestamps=True,
            warmup=False,
        )
        if len(outputs) != len(prompts) or any(output.error for output in outputs.values()):
            raise ConfigError(f"transformers' continuous batching failed: {[o.error for o in outputs.values()]}")
        return list(outputs.values())


def _greedy(new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
