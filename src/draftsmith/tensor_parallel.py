"""A target in shards: transformers' tensor parallelism inside groups of neighbouring ranks.

Every rank trains on batches of its own, but a sharded forward needs the same input on all ranks of its group. So a
group runs the batches of its ranks in turn, and each rank keeps the states of its own: as many products per rank as
with whole copies, and samplers, normalisation and resume never hear of groups.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from draftsmith import target_family as family
from draftsmith.ops.transfer import on_host, remember_on_host, to_device


_HEADS = ("num_attention_heads", "num_key_value_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def check_placement(
    config: PreTrainedConfig,
    size: int,
    *,
    adapter: str | None = None,
    gguf_file: str | None = None,
    device_map: Any = None,
) -> None:
    """Raise `ValueError` for a target, or a launch, that cannot be sharded over groups of `size` ranks."""
    if size == 1:
        return
    if size < 1:
        raise ValueError(f"`target_tp` is {size}: pass 1 for a whole target on every rank, or the ranks of a group.")
    if not dist.is_initialized():
        raise ValueError(
            f"`target_tp={size}` needs {size} processes: start them with `torchrun --nproc_per_node {size}`; in "
            "Python, make the training arguments, which connect them, before the target."
        )
    if dist.get_world_size() % size:
        raise ValueError(
            f"`target_tp` is {size}, which does not divide the {dist.get_world_size()} ranks: pass a divisor."
        )
    if device_map is not None:
        raise ValueError("`device_map` and `target_tp` both place the target: leave one out.")
    if adapter is not None:
        raise ValueError("`target_adapter` is not sharded by `target_tp`: merge it into a copy of the target first.")
    text = config.get_text_config()
    if gguf_file is not None or any(vars(item).get("quantization_config") is not None for item in (config, text)):
        raise ValueError(
            "`target_tp` shards plain weights only, and this target is quantised: leave `target_tp` out, or "
            "save a dequantised copy of the target."
        )
    tensors, experts = _layer_rules(text.base_model_tp_plan), _layer_rules(text.base_model_ep_plan)
    if not tensors and not experts:
        raise ValueError(
            f"transformers has no tensor-parallel plan for `{text.model_type}`, so `target_tp` cannot shard it: leave "
            "`target_tp` out."
        )
    sharded_by_head = any("attn" in name and style == "colwise" for name, style in tensors.items())
    for name in (*(_HEADS if sharded_by_head else ()), *(_EXPERTS if not tensors else ())):
        if (number := family.config_field(text, name)) is not None and number % size:
            raise ValueError(
                f"`target_tp` is {size}, which does not divide the target's `{name}` {number}: pass a divisor."
            )


def _layer_rules(plan: dict[str, Any] | None) -> dict[str, Any]:
    return {name: style for name, style in (plan or {}).items() if name.startswith("layers.")}


@contextmanager
def sharded_loading(config: PreTrainedConfig, size: int, **others: Any) -> Iterator[dict[str, Any]]:
    """Options with which `from_pretrained` loads this rank's shard of a target; none, and nothing changes, for size 1.

    transformers shards over all ranks or not at all (its replicas are those of FSDP), so that inside the context the
    mesh is made here. Embedding and output head stay whole: the draft head and its teacher read them on every rank.
    """
    if size == 1:
        yield {}
        return
    check_placement(config, size, **others)
    device = _device()
    takes_mesh = "device_mesh" in inspect.signature(PreTrainedModel.prepare_distribute_model).parameters  # 5.17
    mesh = _one_mesh(device, size) if takes_mesh else _two_meshes(device, size)
    options: dict[str, Any] = {"tp_size": size}
    text = config.get_text_config()
    if not _layer_rules(text.base_model_tp_plan):  # gpt-oss: whole experts are dealt out, the rest is replicated
        options |= {"enable_expert_parallel": True} if takes_mesh else {"ep_size": size}
    own_distribute = vars(DistributedMixin)["maybe_distribute_model"]

    def prepare(cls: Any, distributed_config: Any, **_: Any) -> tuple:
        return distributed_config, device, mesh

    def distribute(cls: Any, model: PreTrainedModel, *args: Any) -> Any:
        _keep_ends_whole(model)
        return own_distribute.__get__(None, cls)(model, *args)

    replaced: dict[str, Any] = {"prepare_distribute_model": prepare, "maybe_distribute_model": distribute}
    originals = {name: vars(DistributedMixin)[name] for name in replaced}
    for name, function in replaced.items():
        setattr(DistributedMixin, name, classmethod(function))
    try:
        yield {"distributed_config": DistributedConfig(**options)}
    finally:
        for name, original in originals.items():
            setattr(DistributedMixin, name, original)


def _device() -> torch.device:
    """Where this process's group communicates, which is where it trains."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _one_mesh(device: torch.device, size: int) -> DeviceMesh:
    shape = (dist.get_world_size() // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replica", "tp"))["tp"]


def _two_meshes(device: torch.device, size: int) -> Any:
    """The ranks as transformers sees them for layers, and for experts."""
    from transformers.distributed.utils import TransformersDeviceMesh

    shape = (1, dist.get_world_size() // size, 1, size)
    names = (("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep"))
    return TransformersDeviceMesh(*(init_device_mesh(device.type, shape, mesh_dim_names=dims) for dims in names))


def _keep_ends_whole(model: PreTrainedModel) -> None:
    plan = model._tp_plan or {}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if name in plan and module in ends:
            if "replicate" in ALL_PARALLEL_STYLES:
                plan[name] = "replicate"  # an empty plan would be refused
            else:
                del plan[name]


class ShardGroup:
    """The ranks that hold one target together, `size` of them."""

    def __init__(self, mesh: DeviceMesh):
        self.size = mesh.size()
        self._rank, self._group = mesh.get_local_rank(), mesh.get_group()
        self._device = _device()
        self._host_group = self._group
        if dist.get_backend(self._group) != "gloo":  # shapes and document ids don't wait for the device
            self._host_group, _ = dist.new_subgroups(self.size, backend="gloo")

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ShardGroup | None":
        """The group of a target that transformers has sharded; None for a whole one."""
        mesh: DeviceMesh | None = family.base_model(model)._device_mesh
        if mesh is None:
            return None
        return cls(mesh["tp"] if mesh.ndim > 1 else mesh)

    def run(self, forward: Callable[[torch.Tensor, torch.Tensor], Any], *own: torch.Tensor) -> Any:
        """Run the batches of all ranks in turn, as every rank of the group must; return the result of this rank's.

        Args:
            forward: takes a batch, `input_ids` and `document_ids` [B, T] int64 each.
            own: the batch of this rank, of any shape; without one, None is returned.
        """
        shape = torch.tensor(own[0].shape if own else (0, 0))
        shapes = [torch.zeros_like(shape) for _ in range(self.size)]
        dist.all_gather(shapes, shape, group=self._host_group)
        result = None
        for rank, (rows, tokens) in enumerate(torch.stack(shapes).tolist()):
            if rank == self._rank and own:
                self._send(*own)
                result = forward(*own)
            elif rows * tokens:
                forward(*self._receive(rank, rows, tokens))
        return result

    def _send(self, input_ids: torch.Tensor, document_ids: torch.Tensor) -> None:
        dist.broadcast(on_host(document_ids).contiguous(), group_src=self._rank, group=self._host_group)
        dist.broadcast(input_ids.contiguous(), group_src=self._rank, group=self._group)

    def _receive(self, rank: int, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        documents = torch.empty(rows, tokens, dtype=torch.int64)
        dist.broadcast(documents, group_src=rank, group=self._host_group)
        input_ids = torch.empty(rows, tokens, dtype=torch.int64, device=self._device)
        dist.broadcast(input_ids, group_src=rank, group=self._group)
        document_ids = to_device(documents, self._device)
        remember_on_host(document_ids, documents)
        return input_ids, document_ids
