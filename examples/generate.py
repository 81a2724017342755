"""Generate text from a prompt, piece by piece.

python examples/generate.py [MODEL] [PROMPT]
"""

import sys

from xinfer_vk import LLM


def main(model: str = "smollm2-135m", prompt: str = "Write one sentence about rain.") -> None:
    with LLM(model) as llm:
        print(llm)
        stream = llm.stream(prompt, max_tokens=60, temperature=0.8, seed=7)
        for piece in stream:
            print(piece, end="", flush=True)
        result = stream.result
        print(f"\n[{result.finish_reason}] {result.metrics.timing_line()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
