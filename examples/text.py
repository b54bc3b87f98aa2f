"""Text in, text out, with a small real model: fetched at the first run, and then kept in the user's cache."""

from tllm_core import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at"]


def main() -> None:
    with LLM("smollm2-135m", dtype="float32") as llm:
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=12)):
            print(repr(output.outputs[0].text), output.outputs[0].finish_reason)
        for output in llm.generate_async("Once upon a time", SamplingParams(max_tokens=40, temperature=0.7, seed=1)):
            print(output.outputs[0].text_diff, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
