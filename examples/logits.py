"""Look at probabilities: the logits of a text, log-probabilities of an answer, and a logits processor.

python examples/logits.py [MODEL]
"""

import sys
from collections.abc import Sequence

import numpy as np

from xinfer_vk import LLM


def main(model: str = "smollm2-135m") -> None:
    with LLM(model) as llm:
        ids = llm.tokenize("Water boils at")
        logits = llm.logits(ids)  # float32 [tokens, vocabulary]
        print("logits:", logits.shape)
        print("most likely next:", [llm.decode([int(i)]) for i in np.argsort(-logits[-1])[:3]])

        result = llm.generate(ids, max_tokens=3, logprobs=2)
        for entry in result.logprobs or ():
            others = ", ".join(f"{t!r} {p:.3f}" for t, (_, p) in zip(entry.top_texts, entry.top))
            print(f"{entry.text!r} {entry.logprob:.3f} of {others}")

        def no_digits(token_ids: Sequence[int], row: np.ndarray) -> np.ndarray:
            row[digits] = -np.inf  # the row is a copy
            return row

        digits = [i for i in range(len(logits[-1])) if any(c.isdigit() for c in llm.decode([i]))]
        print("without digits:", llm.generate(ids, max_tokens=8, logits_processors=no_digits).text)


if __name__ == "__main__":
    main(*sys.argv[1:])
