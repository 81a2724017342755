"""Ask once with a list of messages, then hold a conversation, which keeps what it has read in the KV cache.

python examples/chat.py [MODEL]
"""

import sys

from xinfer_vk import LLM


def main(model: str = "smollm2-135m") -> None:
    with LLM(model) as llm:
        once = llm.chat([{"role": "user", "content": "What is the capital of France?"}], max_tokens=30)
        print("once:", once.text)

        session = llm.session(system="You are a helpful assistant.", max_tokens=30)
        for question in ("What is the capital of Spain?", "And of Italy?"):
            print("you:", question)
            stream = session.send(question)
            print("model:", "".join(stream))
            metrics = stream.result.metrics
            print(f"[{metrics.reused_tokens} tokens were in the cache, {metrics.prefilled_tokens} were run]")


if __name__ == "__main__":
    main(*sys.argv[1:])
