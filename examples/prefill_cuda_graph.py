"""A stack of Gated Delta Net layers, captured once in a CUDA graph and replayed for many batch layouts.

    python examples/prefill_cuda_graph.py

Each replay is compared with an eager run of the same batch by the same kernel. Without a GPU nothing is captured: the
layouts run eagerly on the CPU, through the one plan and through plans of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import kernelreg
from kernelreg.gdn import Plan, chunk_gated_delta_rule, plan

H, HV, K, V = 16, 32, 128, 128  # linear key heads, value heads, head sizes of Qwen3-Next-80B-A3B
HIDDEN, LAYERS = 512, 4
TOKENS, SEQUENCES = 1024, 8  # the most that a batch may have
LAYOUTS = (
    [1024],
    [512, 512],
    [128] * 8,
    [1, 2, 3, 500, 5, 6, 7],
    [64, 0, 200],  # an empty sequence
    [700, 1],
    [17],  # far from full
)
#: Both sides run the same kernel on the same numbers; only sums of matrix products may be rounded in another order.
BOUND = 5e-3


class Layer(nn.Module):
    """A Gated Delta Net layer without its convolution and output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [H * K, H * K, HV * V, HV, HV]
        self.project = nn.Linear(HIDDEN, sum(self.sizes), bias=False)
        self.out = nn.Linear(HV * V, HIDDEN, bias=False)

    def forward(self, x: Tensor, state: Tensor, batch: Plan) -> tuple[Tensor, Tensor]:
        """From ``[1, T, HIDDEN]`` and states ``[N, HV, K, V]`` to the same."""
        q, k, v, g, beta = self.project(x).split(self.sizes, -1)
        o, final = chunk_gated_delta_rule(
            q.unflatten(-1, (H, K)),
            k.unflatten(-1, (H, K)),
            v.unflatten(-1, (HV, V)),
            logsigmoid(g.float()),
            beta.float().sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            plan=batch,
        )
        assert final is not None
        return x + self.out(o.flatten(2)), final


def run(layers: nn.ModuleList, x: Tensor, states: Tensor, batch: Plan) -> tuple[Tensor, Tensor]:
    """All layers, each with its states of ``[LAYERS, N, HV, K, V]``; one plan serves them all."""
    finals = []
    for layer, state in zip(layers, states, strict=True):
        x, final = layer(x, state, batch)
        finals.append(final)
    return x, torch.stack(finals)


def capture(replayed: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """The function as a replay of its own graph: warmed up on a side stream, which compiles, then captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = replayed()

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


def difference(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300))


def captured_by(device: torch.device) -> str:
    """The backend that runs these layers while a graph is captured; ``explain()`` says why not the others."""
    chosen = kernelreg.resolve(
        "gdn",
        device=str(device),
        dtype="bfloat16",
        gate_dtype="float32",
        state_dtype="float32",
        head_dim_k=K,
        head_dim_v=V,
        heads=H,
        value_heads=HV,
        tokens=TOKENS,
        sequences=SEQUENCES,
        features={"capture-varlen", "empty-sequences", "initial-state", "final-state", "qk-l2norm"},
    )
    print(chosen.explain())
    assert chosen.backend is not None
    return chosen.backend


def main() -> int:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS if on_gpu else 1)).to(device, torch.bfloat16)
    x = torch.zeros(1, TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    states = torch.zeros(len(layers), SEQUENCES, HV, K, V, device=device)
    batch = plan([0, TOKENS], max_tokens=TOKENS, max_sequences=SEQUENCES, device=device)

    def layered() -> tuple[Tensor, Tensor]:
        return run(layers, x, states, batch)

    worst = 0.0
    with torch.no_grad(), kernelreg.use(backend=captured_by(device) if on_gpu else "torch"):
        if on_gpu:
            replay = capture(layered)
            print(f"{LAYERS} layers captured on {torch.cuda.get_device_name()}; each replay against an eager run:")
        else:
            replay = layered
            print("no CUDA device, so nothing is captured: one layer eagerly on the CPU, one plan against many:")
        for lengths in LAYOUTS:
            edges = torch.tensor([0, *lengths]).cumsum(0)
            end, held = int(edges[-1]), len(lengths)
            x.copy_(torch.randn(x.shape))
            states.copy_(0.1 * torch.randn(states.shape))
            batch.update(edges)
            o, finals = replay()
            own = plan(edges, max_sequences=SEQUENCES, device=device)
            eager_o, eager_finals = run(layers, x[:, :end], states, own)
            errors = difference(o[:, :end], eager_o), difference(finals, eager_finals)
            print(f"  {lengths!s:40} output {errors[0]:.1e}  states {errors[1]:.1e}")
            if not torch.equal(finals[:, held:], states[:, held:]):
                print("  the states of sequences that the batch does not have were changed")
                return 1
            worst = max(worst, *errors)
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
