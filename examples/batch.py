"""Answer several prompts as one batch, and write each result as a line of JSON.

python examples/batch.py [MODEL] [PROMPT …]
"""

import json
import sys

from xinfer_vk import LLM

PROMPTS = ("Name a tree.", "Name a river.", "Name a bird.")


def main(model: str = "smollm2-135m", *prompts: str) -> None:
    with LLM(model) as llm:
        for result in llm.batch(prompts or PROMPTS, max_tokens=20):
            record = {"prompt": result.prompt, "text": result.text, "finish_reason": result.finish_reason}
            print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
