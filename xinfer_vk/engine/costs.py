"""What a step must read and compute at least: weights and cached keys and values once, however often a
kernel really reads them; of a mixture those experts that the tokens choose if they choose evenly. ``bench``
divides these by times; activations, which caches hold, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xinfer_vk.kernels.base import COUNTS
from xinfer_vk.kernels.kv import vector_words
from xinfer_vk.kernels.layout import FORMATS, row_words
from xinfer_vk.plan import WORD_BYTES, Plan, Step


@dataclass(frozen=True)
class Cost:
    """``weight_bytes`` and ``kv_bytes`` that must be read, and floating-point operations (a product and a
    sum are two)."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flops + other.flops,
        )

    def __mul__(self, share: float) -> Cost:
        return Cost(round(self.weight_bytes * share), round(self.kv_bytes * share), round(self.flops * share))


@dataclass(frozen=True)
class Batch:
    """What a run was given, for costs: ``tokens`` rows, of which ``outputs`` want logits; ``contexts``:
    for each sequence how many tokens it has (its new ones included) and how many of them are new."""

    tokens: int
    outputs: int
    contexts: Sequence[tuple[int, int]]

    def seen(self, window: int) -> int:
        """Positions that rows attend to, the last ``window`` at most, over all rows."""
        return sum(min(p + 1, window) for total, new in self.contexts for p in range(total - new, total))

    def read(self, window: int) -> int:
        """Positions whose keys and values must be read, each once for the rows of its sequence."""
        return sum(min(total, new - 1 + window) for total, new in self.contexts)


def plan_cost(plan: Plan, batch: Batch) -> Cost:
    return sum((step_cost(step, batch) for step in plan.steps), Cost())


def step_cost(step: Step, batch: Batch) -> Cost:
    """Matrix products and attention; other steps only touch activations and cost nothing here."""
    kernel, p = step.kernel, step.kernel.unpack(step.push)
    names = kernel.name.split(".")
    if "w" in kernel.bindings and hasattr(p, "epilogue"):
        fmt = next(name for name in names if name in FORMATS)
        rows_in = float(batch.outputs if p.count_at == COUNTS["outputs"] else batch.tokens)
        matrices = 1.0
        if experts := dict(kernel.spec).get("experts"):
            unused = (1 - p.per_token / experts) ** batch.tokens  # the share that no token chooses
            matrices, rows_in = p.experts * (1 - unused), float(batch.tokens)
            rows_in *= p.per_token * p.experts / experts
        return Cost(
            weight_bytes=round(matrices * p.rows * row_words(fmt, p.cols) * WORD_BYTES),
            flops=round(2 * p.rows * p.cols * rows_in),
        )
    if "attention" in names:
        head_dim, group = (dict(kernel.spec)[name] for name in ("head_dim", "group"))
        dtype = names[1]
        per_token = 2 * p.kv_heads * vector_words(dtype, head_dim) * WORD_BYTES
        return Cost(
            kv_bytes=per_token * batch.read(p.window),
            flops=4 * p.kv_heads * group * head_dim * batch.seen(p.window),
        )
    return Cost()
