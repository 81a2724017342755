"""A block's mixture of experts, where other blocks have an MLP (Shazeer et al. 2017; Jiang et al. 2024).

h → router → the experts of each token, and their weights
y = sum over a token's experts e of weight_e · Wd_e (silu(Wg_e h) * Wu_e h)
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import ExpertMatrix, Matrix, WeightPlanner


@dataclass(frozen=True)
class Experts:
    """A layer's router and experts. Gate and up are one matrix, or two of unlike formats."""

    router: tuple[Matrix, ...]  # [experts, hidden]
    gate_up: tuple[ExpertMatrix, ...]  # of each expert [2 * width, hidden], rows interleaved when it is one
    down: tuple[ExpertMatrix, ...]  # [hidden, width]


def load_experts(planner: WeightPlanner, c: ModelConfig, name: str) -> Experts:
    """Declare the tensors of the MLP that is called ``name``, "model.layers.0.mlp"."""
    e = c.experts
    assert e is not None
    return Experts(
        router=planner.stack([(f"{name}.gate", e.count)], c.hidden_size),
        gate_up=planner.experts(
            f"{name}.experts",
            e.count,
            [("gate_proj", e.width), ("up_proj", e.width)],
            c.hidden_size,
            interleave=True,
        ),
        down=planner.experts(f"{name}.experts", e.count, [("down_proj", c.hidden_size)], e.width),
    )


def add_experts(g: Graph, w: Experts) -> None:
    """``x += sum of weight_e · expert_e(h)`` over the experts e that a row h of the normed stream chooses."""
    act, normed = g.act, g.act.normed
    g.linear(normed, w.router, act.router, label="router")
    routing = g.route(act.router, (*w.gate_up, *w.down))
    hidden = act.expert_hidden
    if len(w.gate_up) == 1:
        g.experts(routing, normed, w.gate_up[0], hidden, "swiglu", "expert gate_up", x_of_tokens=True)
    else:
        gate, up = w.gate_up
        g.experts(routing, normed, gate, hidden, "store", "expert gate", x_of_tokens=True)
        g.experts(routing, normed, up, hidden, "gated", "expert up", x_of_tokens=True)
    g.experts(routing, hidden, w.down[0], act.expert_out, "store", "expert down")
    g.combine(routing, act.expert_out, act.residual)
