"""What a training step takes on several GPUs, from shapes, times of one GPU and constants of the links.

The step of one GPU, plus what its collectives add that nothing hides, plus what waiting for the slowest rank adds,
less the part of the optimizer that ZeRO gives to the other ranks. Weights and gradients travel in bf16.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import torch

from draftsmith import Eagle3DraftModel

from .train_cases import Case


ITEM = 2  # bytes of a weight or gradient on its way: DeepSpeed's `communication_data_type` beside bf16 is bf16
# Times that a ring passes an array through each link, by (n - 1) / n: nccl-tests, doc/PERFORMANCE.md, "Summary".
PASSES = {"AllReduce": 2, "ReduceScatter": 1, "AllGather": 1}
BLOCKED = 32 / 132  # of the GPU, by a collective: NCCL launches up to 32 blocks (NCCL_MAX_CTAS), an H200 has 132 SMs
# Standard deviation of the speed of GPUs of one kind, an assumption: Sinha et al., "Not All GPUs Are Created Equal"
# (SC 2022), saw equal work take times that vary by 8% over the GPUs of a cluster.
GPU_DEVIATION = 0.01
SMALL = 3  # scalars per step that ranks agree on: supervised rows, overflow, gradient norm
LIVE = 1e9  # weights that ZeRO-3 keeps whole at a time (`stage3_max_live_parameters`, its default)
QUANTILES = 20_000  # that an integral is summed over


@dataclass(frozen=True)
class Links:
    """Bytes per second and direction. NVLink: 18 links of an H100 or H200 at the 20.6 GB/s that NCCL counts on for
    each (SM90_NVLINK_BW, src/graph/topo.h). Network: InfiniBand of 400 Gb/s for every GPU, an assumption. Microseconds
    are those of NCCL's own cost model for rings under its protocol Simple (src/graph/tuning.cc)."""

    nvlink: float = 18 * 20.6e9
    network: float = 400e9 / 8
    node: int = 8  # GPUs of a host
    base_us: float = 8.4
    nvlink_us: float = 3.4  # per hop
    network_us: float = 14.0

    def bandwidth(self, gpus: int) -> float:
        """Of the ring. Between hosts as many rings run as there are cards, and share what NVLink carries inside."""
        return self.nvlink if gpus <= self.node else min(self.nvlink, self.node * self.network)

    def latency_ms(self, kind: str, gpus: int) -> float:
        """Every pass is n - 1 hops, of which one less than there are hosts are through the network."""
        between = math.ceil(gpus / self.node) - 1
        hops = (gpus - 1 - between) * self.nvlink_us + between * self.network_us
        return (self.base_us + PASSES[kind] * hops) / 1000 if gpus > 1 else 0.0

    def collective_ms(self, kind: str, size: float, gpus: int) -> float:
        """Of an array of `size` bytes, that of all ranks together where each has a part."""
        moved = PASSES[kind] * (gpus - 1) / gpus * size
        return self.latency_ms(kind, gpus) + 1000 * moved / self.bandwidth(gpus)


@dataclass(frozen=True)
class Shape:
    """Of a head and its target. `matrices` in forward order: of the fusion, the layer, the output head."""

    matrices: tuple[int, ...]
    norms: int  # weights of all norms
    ttt_steps: int
    target_width: int
    target_vocabulary: int
    target_layers: int
    tensor_parallel: bool  # shards every product of a layer; else whole experts are dealt out

    @classmethod
    def of(cls, case: Case) -> "Shape":
        with torch.device("meta"):
            weights = list(Eagle3DraftModel(case.draft_config).parameters())
        text = case.target_config.get_text_config()
        return cls(
            matrices=tuple(weight.numel() for weight in weights if weight.dim() > 1),
            norms=sum(weight.numel() for weight in weights if weight.dim() == 1),
            ttt_steps=case.steps,
            target_width=text.hidden_size,
            target_vocabulary=text.vocab_size,
            target_layers=text.num_hidden_layers,
            tensor_parallel=any(name.startswith("layers.") for name in text.base_model_tp_plan or {}),
        )

    @property
    def weights(self) -> int:
        return sum(self.matrices) + self.norms

    @property
    def products(self) -> float:
        """FLOP of the draft's products for one row, all supervised: 2 per weight forward, 4 backward; of the fusion 2
        backward, since its input has no gradient; for the loss also the teacher's logits."""
        fusion, *layer, head = self.matrices
        return 4 * fusion + 6 * self.ttt_steps * (sum(layer) + head) + 2 * self.target_width * self.target_vocabulary


@dataclass(frozen=True)
class OneGpu:
    """Measured on one GPU, in ms. `optimizer_ms` is the update of all fp32 weights."""

    tokens: int
    step_ms: float
    target_ms: float
    optimizer_ms: float
    deviation_ms: float = 0.0  # of a step from the mean

    @property
    def draft_ms(self) -> float:
        return self.step_ms - self.target_ms - self.optimizer_ms


@dataclass(frozen=True)
class Run:
    """What is launched."""

    gpus: int
    stage: int  # of ZeRO
    accumulation: int = 1
    target_tp: int = 1
    row_variation: float = 0.0  # standard deviation of a batch's supervised rows, as a share of their mean


@dataclass(frozen=True)
class Prediction:
    """Of one optimizer step, in ms; what is not exposed hides behind computation."""

    step_ms: float
    collectives_ms: float
    exposed_ms: float
    straggling_ms: float
    bytes: dict[str, float]  # by kind of collective, of whole arrays


def traffic(shape: Shape, stage: int, accumulation: int = 1) -> dict[str, float]:
    """Bytes of the arrays that a step's collectives go over, as DeepSpeed 0.19 issues them.

    ZeRO 1 and 2 all-reduce gradients and then keep a part (`use_multi_rank_bucket_allreduce`, its default), and
    all-gather the weights after the update; ZeRO-3 reduce-scatters gradients, and gathers each matrix where it is
    first used: until the backward is over it stays, since all of a head fit into what may be whole at a time. ZeRO-1
    reduces once per optimizer step, the others, which keep no whole gradients, once per micro-batch. Raises
    `ValueError` for heads that ZeRO-3 would gather more than once.
    """
    everything = ITEM * shape.weights
    if stage < 3:
        return {"AllReduce": everything * (accumulation if stage == 2 else 1), "AllGather": everything}
    if shape.weights > LIVE:
        raise ValueError(f"a head of {shape.weights:,} weights is more than ZeRO-3 keeps whole: not modelled.")
    gathered = ITEM * (sum(shape.matrices) * accumulation + shape.norms)
    return {"ReduceScatter": everything * accumulation, "AllGather": gathered}


def predict(shape: Shape, one: OneGpu, run: Run, links: Links) -> Prediction:
    """On one GPU without accumulation the measured step. Raises `ValueError` for what is not modelled."""
    micro_batches, stage, gpus = run.accumulation, run.stage, run.gpus
    reductions = micro_batches if stage >= 2 else 1
    behind = [(time, hidden, reductions) for time, hidden in _reductions(shape, one, run, links)]
    if stage < 3:
        behind.append((links.collective_ms("AllGather", ITEM * shape.weights, gpus), 0.0, 1))
    else:
        behind += [(time, hidden, micro_batches) for time, hidden in _gathers(shape, one, run, links)]
        behind.append((links.collective_ms("AllGather", ITEM * shape.norms, gpus), 0.0, 1))
    behind.append((links.latency_ms("AllReduce", gpus), 0.0, SMALL))
    behind.append((_target_reduction_ms(shape, one, run, links), 0.0, micro_batches))
    collectives = sum(times * time for time, _, times in behind)
    exposed = sum(times * max(0.0, time - hidden) for time, hidden, times in behind)
    straggling = _straggling_ms(one, run)
    computed = micro_batches * (one.step_ms - one.optimizer_ms) + one.optimizer_ms / gpus
    return Prediction(
        step_ms=computed + exposed + BLOCKED * (collectives - exposed) + straggling,
        collectives_ms=collectives,
        exposed_ms=exposed,
        straggling_ms=straggling,
        bytes=traffic(shape, stage, micro_batches) if gpus > 1 else {},
    )


def _reductions(shape: Shape, one: OneGpu, run: Run, links: Links) -> list[tuple[float, float]]:
    """Each gradient's reduction, and the computation that it may hide behind: what comes before the next gradient.

    Every matrix is larger than a bucket (`reduce_bucket_size: auto` is width squared) and goes by itself, and the
    backward waits for it when the next is ready (`average_tensor` in DeepSpeed). The output head's gradient comes
    from the loss, before the backward; all others are whole only in step 0, which the backward reaches last: products
    of K - 1 steps lie between. The last one, of the fusion, hides behind nothing.
    """
    kind = "AllReduce" if run.stage < 3 else "ReduceScatter"
    per_flop = one.draft_ms / shape.products
    fusion, *layer, head = shape.matrices
    first, *others = reversed(layer)
    computed = [4 * (shape.ttt_steps - 1) * sum(layer) + 4 * first, *(4 * size for size in others), 2 * fusion, 0]
    sizes = [head, first, *others, fusion + shape.norms]
    times = (links.collective_ms(kind, ITEM * size, run.gpus) for size in sizes)
    return [(time, per_flop * flop) for time, flop in zip(times, computed, strict=True)]


def _gathers(shape: Shape, one: OneGpu, run: Run, links: Links) -> list[tuple[float, float]]:
    """ZeRO-3's gathering of each matrix, which hides behind the product before it: one is fetched ahead
    (`stage3_prefetch_bucket_size: auto` is less than a matrix). Nothing of the draft runs before the first."""
    per_flop = one.draft_ms / shape.products
    hidden = [0.0, *(per_flop * 2 * size for size in shape.matrices[:-1])]
    times = (links.collective_ms("AllGather", ITEM * size, run.gpus) for size in shape.matrices)
    return list(zip(times, hidden, strict=True))


def _target_reduction_ms(shape: Shape, one: OneGpu, run: Run, links: Links) -> float:
    """Of a target in shards: after attention and after the MLP of every layer all ranks of a group add their parts,
    [tokens, width] in bf16, for the batch of each of them in turn; the next product waits. The products of a rank are
    as many as with a whole target."""
    if run.target_tp == 1:
        return 0.0
    if not shape.tensor_parallel:
        raise ValueError("a target whose experts are dealt out repeats its attention on every rank: not modelled.")
    once = links.collective_ms("AllReduce", ITEM * one.tokens * shape.target_width, run.target_tp)
    return 2 * shape.target_layers * run.target_tp * once


def _straggling_ms(one: OneGpu, run: Run) -> float:
    """What the slowest of n ranks takes beyond the mean, whenever they meet: every micro-batch, or under ZeRO-1 once
    per optimizer step, by when the deviations of batches have grown with the root of their number, those of GPUs with
    the number."""
    gpu = GPU_DEVIATION * one.step_ms
    batch = math.hypot(one.deviation_ms, run.row_variation * one.draft_ms)
    batches = run.accumulation
    deviation = batches * math.hypot(gpu, batch / math.sqrt(batches) if run.stage == 1 else batch)
    return expected_maximum(run.gpus) * deviation


@cache
def expected_maximum(count: int) -> float:
    """Of so many independent standard normal numbers: the mean over u in (0, 1) of the quantile of u ** (1 / n)."""
    if count == 1:
        return 0.0
    points = ((step + 0.5) / QUANTILES for step in range(QUANTILES))
    return math.fsum(NormalDist().inv_cdf(point ** (1 / count)) for point in points) / QUANTILES
