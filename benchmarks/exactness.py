"""How far logits are from float64: ours with an f32 KV cache, and those of transformers in float32.

    pip install torch transformers gguf accelerate     # beside xinfer-vk, in an environment of its own
    python benchmarks/exactness.py --model smollm2-135m --tokens 256,700,1500,3000

The reference is transformers' Llama in float64. Its norms, rotary angles and softmax are replaced by float64
ones, because transformers computes those in float32 whatever the model's type. The text is --file, repeated
until it is long enough. The table has, for each length, the largest difference of any logit at any position.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from xinfer_vk.errors import XinferError

ALICE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "alice.txt"
BLOCK = 256  # rows compared at once: float64 logits of a long text do not fit in memory


def reference(path: Path) -> tuple[Any, Any]:
    """transformers' model of a GGUF file or a directory, in float32 and in float64 throughout."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama as llama

    def load() -> Any:
        kind = {"dtype": torch.float32, "attn_implementation": "eager"}
        if path.is_file():
            return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **kind).eval()
        return AutoModelForCausalLM.from_pretrained(path, **kind).eval()

    def norm(self: Any, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: Any, position_ids: Any) -> tuple[Any, Any]:
        base, dim = self.config.rope_parameters["rope_theta"], x.shape[-1]
        if self.rope_type != "default":
            raise SystemExit(f"error: RoPE scaling {self.rope_type}: this script knows the default one alone")
        dim = getattr(self.config, "head_dim", None) or dim // self.config.num_attention_heads
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turned = position_ids[..., None].double() * frequencies
        both = torch.cat((turned, turned), dim=-1)
        return both.cos(), both.sin()

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = (llama.repeat_kv(x, module.num_key_value_groups) for x in (k, v))
        n = q.shape[2]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        rows = []
        for head in range(q.shape[1]):  # one at a time: all scores in float64 take gigabytes
            scores = (q[:, head] @ k[:, head].transpose(1, 2) * scaling).masked_fill(~causal, -torch.inf)
            rows.append(scores.softmax(-1) @ v[:, head])
        return torch.stack(rows, dim=2), None

    plain, exact = load(), load().double()
    for module in exact.modules():
        if isinstance(module, llama.LlamaRMSNorm):
            module.forward = norm.__get__(module)
        elif isinstance(module, llama.LlamaRotaryEmbedding):
            module.forward = angles.__get__(module)
        elif isinstance(module, llama.LlamaAttention):
            module.config._attn_implementation = "float64"
    from transformers import AttentionInterface

    AttentionInterface.register("float64", attention)
    return plain, exact


def largest_differences(ours: np.ndarray, plain: Any, exact: Any, ids: list[int]) -> list[float]:
    """Of any logit: ours to float64, transformers' float32 to float64, ours to transformers' float32."""
    import torch

    with torch.no_grad():
        tokens = torch.tensor([ids])
        hidden32 = plain.model(tokens).last_hidden_state[0]
        hidden64 = exact.model(tokens).last_hidden_state[0]
        found = np.zeros(3)
        for at in range(0, len(ids), BLOCK):
            rows = slice(at, at + BLOCK)
            a = torch.from_numpy(ours[rows]).double()
            b, c = plain.lm_head(hidden32[rows]).double(), exact.lm_head(hidden64[rows])
            found = np.maximum(found, [float((x - y).abs().max()) for x, y in ((a, c), (b, c), (a, b))])
    return [float(x) for x in found]


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="A Llama model.")
@click.option("--device", help="As for xinfer-vk generate.")
@click.option("--tokens", default="256,700,1500,3000", show_default=True, help="Lengths, a list.")
@click.option("--file", "text", default=ALICE, type=click.Path(exists=True, path_type=Path))
def main(model: str, device: str | None, tokens: str, text: Path) -> None:
    """Compare logits with float64."""
    from xinfer_vk import LLM
    from xinfer_vk.weights.hub import resolve_model

    lengths = sorted(int(n) for n in tokens.split(","))
    path = Path(resolve_model(model))
    plain, exact = reference(path)
    with LLM(str(path), device=device, kv_dtype="f32", context=lengths[-1]) as llm:
        once = llm.encode(text.read_text(encoding="utf-8"), raw=True)
        ids = (list(once) * -(-lengths[-1] // len(once)))[: lengths[-1]]
        click.echo(f"{llm.name} on {llm.runtime.profile.name}, {text.name} ({len(once)} tokens, repeated)\n")
        click.echo("| tokens | ours − f64 | transformers f32 − f64 | ours − transformers f32 |")
        click.echo("|---|---|---|---|")
        for n in lengths:
            differences = largest_differences(llm.logits(ids[:n]), plain, exact, ids[:n])
            click.echo(f"| {n} | " + " | ".join(f"{d:.1e}" for d in differences) + " |")


if __name__ == "__main__":
    try:
        main()
    except XinferError as error:
        sys.exit(f"error: {error}")
