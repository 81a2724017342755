"""Whether llama.cpp reads a GGUF file as we do: tokens, logits, a greedy text. A check by hand, not in CI.

    pip install llama-cpp-python
    python benchmarks/llama_cpp_check.py FILE.gguf …

Both run the same file on the CPU. They cannot agree to the last digit: llama.cpp quantizes activations to 8
bits before it multiplies, we do not.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

ALICE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "alice.txt"
PROMPT = "The capital of France is"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=256, show_default=True, help="Of the text whose logits are compared.")
@click.option("--device", default="numpy", show_default=True, help="Where we run.")
def main(files: tuple[Path, ...], tokens: int, device: str) -> None:
    """Compare with llama.cpp."""
    import llama_cpp

    from xinfer_vk import LLM

    text = ALICE.read_text(encoding="utf-8")
    print(f"llama-cpp-python {llama_cpp.__version__}")
    for file in files:
        theirs = llama_cpp.Llama(str(file), n_ctx=1024, logits_all=True, verbose=False)
        with LLM(file, device=device, kv_dtype="f32") as ours:
            ids = ours.tokenizer.encode(text, parse_special=False, add_bos=False)
            same = theirs.tokenize(text.encode(), add_bos=False, special=False) == ids
            theirs.eval(ids[:tokens])
            a, b = log_softmax(np.array(theirs.scores[:tokens])), log_softmax(ours.logits(ids[:tokens]))
            next_ids = np.array(ids[1:tokens])
            perplexities = [float(np.exp(-x[np.arange(tokens - 1), next_ids].mean())) for x in (a, b)]
            agree = float((a.argmax(axis=1) == b.argmax(axis=1)).mean())
            divergence = float((np.exp(b) * (b - a)).sum(axis=1).mean())
            prompt = ours.encode(PROMPT, raw=True)
            theirs.reset()
            completion = theirs.create_completion(prompt, max_tokens=16, temperature=0)
            mine = ours.generate(prompt, max_new_tokens=16)
        print(
            f"{file.name}\n"
            f"  tokens of the text the same: {same}\n"
            f"  perplexity: llama.cpp {perplexities[0]:.3f}, xinfer-vk {perplexities[1]:.3f}\n"
            f"  the same most likely token: {agree:.1%}; mean KL divergence {divergence:.5f}\n"
            f"  llama.cpp: {completion['choices'][0]['text']!r}\n"
            f"  xinfer-vk: {mine.text!r}"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    main()
