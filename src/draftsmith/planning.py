"""What a training step needs of a GPU's memory, by component, from shapes alone.

R rows are computed at step k of the unroll: the supervised ones. Bytes per row follow what autograd keeps of
`models/eagle3/layers_eagle3.py`, in elements of the compute dtype.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


GIB = 2**30
USABLE = 0.94  # of a GPU: the rest goes to the context, to libraries and to fragmentation
GRANULE = 1024  # tokens
RECOMPUTED_ROWS = 8192  # rows of the MLP at a time, `unroll_eagle3.RECOMPUTED_ROWS`


@dataclass(frozen=True)
class TargetShape:
    hidden_size: int
    vocab_size: int
    aux_states: int  # that the head reads
    weight_bytes: int  # on one GPU
    layer_width: int  # elements per token that its widest layer has at a time
    itemsize: int = 2


@dataclass(frozen=True)
class HeadShape:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the draft's
    trained_parameters: int
    frozen_parameters: int = 0


@dataclass(frozen=True)
class Setup:
    """How the head is trained. `tokens` are those of one micro-batch on one GPU."""

    tokens: int
    ttt_steps: int = 7
    supervised: float = 1.0  # share of the tokens
    chunk_size: int = 1024  # teacher rows whose logits exist at a time
    has_teacher: bool = True  # False: labels only
    recompute: bool = False
    zero_stage: int = 0
    gpus: int = 1
    offload: bool = False  # optimizer states to the host

    @property
    def rows(self) -> int:
        return round(self.tokens * self.supervised)


@dataclass(frozen=True)
class Plan:
    """Bytes by component. All of `held` exist at once; beside them one of `phases` at a time."""

    held: dict[str, float]
    phases: dict[str, dict[str, float]]

    @property
    def peak(self) -> float:
        return sum(self.held.values()) + max(sum(phase.values()) for phase in self.phases.values())

    @property
    def highest_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


def plan(target: TargetShape, head: HeadShape, setup: Setup) -> Plan:
    """The components of one step's memory: weights and states, and what each phase of the step adds."""
    states = setup.tokens * target.hidden_size * target.itemsize
    held = {
        "target weights": target.weight_bytes,
        **_trained_state(head, setup),
        "target states": states * (target.aux_states + 1),
    }
    unroll = {"unroll": _unroll_bytes(head, setup)}
    gradients = {"head gradients": 4 * head.trained_parameters} if setup.zero_stage == 0 else {}
    phases: dict[str, dict[str, float]] = {
        "target forward": {"target activations": setup.tokens * target.layer_width * target.itemsize},
        "loss": unroll | _loss_bytes(target, head, setup),
        "MLP backward": unroll | gradients | {"of one step's MLP": _mlp_backward(head, setup)},
        "attention backward": unroll | gradients | {"of one step's attention": _attention_backward(head, setup)},
    }
    return Plan(held, phases)


def _trained_state(head: HeadShape, setup: Setup) -> dict[str, float]:
    """fp32 masters and AdamW's moments; under ZeRO the weights are bf16 and the masters a part of the optimizer."""
    count, share = head.trained_parameters, 1 / setup.gpus
    frozen = 2 * head.frozen_parameters
    if setup.zero_stage == 0:
        return {"head weights": 4 * count + frozen, "bf16 copies of the head": 2 * count, "optimizer": 8 * count}
    weights = 2 * count * (share if setup.zero_stage == 3 else 1)
    gradients = 2 * count * (share if setup.zero_stage >= 2 else 1)
    optimizer_bytes = 0 if setup.offload else 12 * count * share
    return {"head weights": weights + frozen, "head gradients": gradients, "optimizer": optimizer_bytes}


def _kept_per_row(head: HeadShape, *, recompute: bool) -> int:
    """Elements that a step keeps of each of its rows until its backward."""
    hidden, attended, keys = head.hidden_size, head.num_heads * head.head_dim, 2 * head.num_kv_heads * head.head_dim
    # The selected input, the keys and values, attention's result, the layer's normed output.
    kept = 2 * hidden + keys + attended
    if recompute:
        return kept
    # The input's norm, the query, the MLP's input and its norm, gate and up, the output.
    return kept + 4 * hidden + attended + 2 * head.intermediate_size


def _unroll_bytes(head: HeadShape, setup: Setup) -> float:
    keys = 2 * head.num_kv_heads * head.head_dim
    per_row = _kept_per_row(head, recompute=setup.recompute) * setup.ttt_steps
    # Of step 0 also the rows that do not query: fused state, keys and, unless recomputed, norms.
    idle = head.hidden_size + keys
    if not setup.recompute:
        per_row += keys * sum(max(0, step - 1) for step in range(setup.ttt_steps))  # earlier ones, for each later step
        idle += head.hidden_size
    kept = setup.rows * per_row + (setup.tokens - setup.rows) * idle
    if not setup.recompute:
        kept += (setup.tokens + setup.rows) * head.hidden_size  # normed embeddings
    return 2 * (kept + _projected_embeddings(head, setup))


def _projected_embeddings(head: HeadShape, setup: Setup) -> float:
    """Elements of what embeddings add to the queries of supervised rows, and to all keys and values."""
    return setup.rows * head.num_heads * head.head_dim + setup.tokens * 2 * head.num_kv_heads * head.head_dim


def _loss_bytes(target: TargetShape, head: HeadShape, setup: Setup) -> dict[str, float]:
    chunk = min(setup.chunk_size, max(setup.rows, 1))
    teacher = target.vocab_size * target.itemsize if setup.has_teacher else 0
    parts: dict[str, float] = {
        "logits": chunk * (2 * setup.ttt_steps * head.vocab_size + teacher),
        "head gradient in fp32": 4 * head.vocab_size * head.hidden_size,
        "teacher states": setup.rows * target.hidden_size * target.itemsize,
    }
    if not setup.recompute:  # else they take the place of the normed outputs at once, which are gone when it ends
        parts["state gradients"] = 2 * setup.rows * setup.ttt_steps * head.hidden_size
    return parts


def _mlp_backward(head: HeadShape, setup: Setup) -> float:
    """Gradients that the backward of one step's MLP has at a time; with recompute its activations, of fewer rows."""
    if setup.recompute:
        return 2 * min(setup.rows, RECOMPUTED_ROWS) * (5 * head.intermediate_size + 3 * head.hidden_size)
    return 2 * setup.rows * (3 * head.intermediate_size + 2 * head.hidden_size)


def _attention_backward(head: HeadShape, setup: Setup) -> float:
    """What the backward of the last step's attention has at a time, beside what is kept; its MLP keeps nothing more.

    Of width `attended`: the output's gradient, the query's in fp32 and twice in bf16, and three tensors spread over
    all rows. Keys and values: the gradients of those of all steps and, with recompute, themselves.
    """
    attended, keys = head.num_heads * head.head_dim, 2 * head.num_kv_heads * head.head_dim
    widths = 8 * attended + setup.ttt_steps * keys
    if setup.recompute:
        return 2 * setup.rows * (widths + head.hidden_size + (setup.ttt_steps - 1) * keys)
    return 2 * setup.rows * (widths - 2 * head.intermediate_size - 2 * head.hidden_size)


def longest_context(
    target: TargetShape, head: HeadShape, setup: Setup, memory: float, chunk_size: Callable[[Setup], int]
) -> int:
    """The most tokens, in whole GRANULEs, with which a step fits into `memory` bytes; 0 where nothing fits."""
    tokens = 0
    step = GRANULE * 2**14
    while step >= GRANULE:
        longer = replace(setup, tokens=tokens + step)
        longer = replace(longer, chunk_size=chunk_size(longer))
        if plan(target, head, longer).peak <= USABLE * memory:
            tokens += step
        step //= 2
    return tokens


def levers(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """What can be done about memory, cheapest first, each on top of those before."""
    yield "as it is", setup
    if not setup.recompute:
        setup = replace(setup, recompute=True)
        yield "gradient_checkpointing: true", setup
    if setup.gpus > 1 and setup.zero_stage < 2:
        setup = replace(setup, zero_stage=2)
        yield "DeepSpeed ZeRO-2", setup
    if not setup.offload:
        setup = replace(setup, zero_stage=max(setup.zero_stage, 2), offload=True)
        yield "DeepSpeed ZeRO-2 with the optimizer on the host", setup
