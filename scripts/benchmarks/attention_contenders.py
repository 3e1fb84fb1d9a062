"""Whoever computes attention here: our engines, dense attention, FlexAttention with the mask that its users write."""

from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from draftsmith.ops import block_sparse_flash_attention
from draftsmith.ops.block_sparse_attention.engines import choose
from draftsmith.ops.block_sparse_attention.layout import Layout

from .attention_cases import Case, Inputs
from .attention_check import dense_attention, visible_keys


def score_bytes(engine: str, case: Case, step: int) -> int:
    """What the score matrices of a dense `engine` take in bf16 when most of them are alive; 0 for the others."""
    scores = case.batch * case.heads[0] * len(case.positions()) * case.length
    if engine == "dense":  # weights and, in the softmax's backward, two gradients
        return 3 * 2 * scores * (step + 1)
    if engine == "reference":  # diagonals are single columns there; softmax in fp32
        return 18 * scores
    return 0


class Contender:
    """`leaves` receive gradients; a subclass says how the output follows from them."""

    leaves: list[Tensor]
    grad_out: Tensor

    def forward(self) -> Tensor:
        raise NotImplementedError

    def forward_backward(self) -> list[Tensor]:
        """The output and the gradient of every leaf."""
        out = self.forward()
        return [out, *torch.autograd.grad(out, self.leaves, self.grad_out)]

    def run(self, grad_out: Tensor) -> list[Tensor]:
        """The output and the gradients of `Inputs.tensors`."""
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, grad_out)]


class Ours(Contender):
    def __init__(self, inputs: Inputs, implementation: str | None):
        case = inputs.case
        self.inputs, self.leaves, self.grad_out = inputs, inputs.tensors, inputs.grad_out
        batch_rows = (case.batch, -1)
        self.options = {
            "document_ids": inputs.documents.expand(batch_rows).contiguous() if case.documents else None,
            "query_positions": inputs.positions.expand(batch_rows).contiguous() if case.turn else None,
            "sliding_window": case.window,
            "sinks": inputs.sinks[0] if inputs.sinks else None,
            "implementation": implementation,
        }

    def forward(self) -> Tensor:
        inputs = self.inputs
        return block_sparse_flash_attention(
            inputs.query, inputs.key, inputs.value, inputs.diagonal_keys, inputs.diagonal_values, **self.options
        )

    def engine(self) -> str:
        """The one that computes, where the op was left the choice."""
        options, case = self.options, self.inputs.case
        layout = Layout(options["document_ids"], options["query_positions"], case.batch, case.length)
        return choose(options["implementation"], self.inputs.query, layout, case.window)


class Concatenated(Contender):
    """Keys [k0 | k1 | .. | kJ] as one contiguous tensor that is there already: no peer is charged for joining them."""

    def __init__(self, inputs: Inputs):
        if inputs.case.turn is not None:
            raise ValueError("keys are concatenated where every row is a query")
        step = inputs.step
        query, keys = inputs.query, [inputs.key, *inputs.diagonal_keys]
        values = [inputs.value, *inputs.diagonal_values]
        self.leaves = [query.detach().contiguous(), *(torch.cat(parts, 2).detach() for parts in (keys, values))]
        self.leaves = [leaf.requires_grad_() for leaf in (*self.leaves, *inputs.sinks)]
        self.grad_out = inputs.grad_out.contiguous()
        self.step = step

    def run(self, grad_out: Tensor) -> list[Tensor]:
        out, query, keys, values, *sinks = super().run(grad_out.contiguous())
        (key, *later_keys), (value, *later_values) = (grad.chunk(self.step + 1, 2) for grad in (keys, values))
        return [out, query, key, value, *later_keys, *later_values, *sinks]


class Dense(Concatenated):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.visible = visible_keys(inputs, torch.arange(inputs.case.length, device=inputs.query.device))

    def forward(self) -> Tensor:
        query, keys, values, *sinks = self.leaves
        return dense_attention(query, keys, values, self.visible, sinks)


class Flex(Concatenated):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.case, self.device = inputs.case, inputs.query.device
        self.mask_function = flex_mask_function(inputs.case, inputs.documents)
        self.block_mask = self.build_mask()

    def build_mask(self) -> BlockMask:
        length = self.case.length
        return _create_block_mask(
            self.mask_function, None, None, length, length * (self.step + 1), device=self.device.type
        )

    def mask_bytes(self) -> int:
        tensors = (tensor for tensor in self.block_mask.as_tuple() if isinstance(tensor, Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def forward(self) -> Tensor:
        attend = _flex_with_sinks if len(self.leaves) > 3 else _flex
        return attend(*self.leaves, block_mask=self.block_mask)


def flex_mask_function(case: Case, documents: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """As EAGLE-3 trainers write it: causal in the document on block 0, a diagonal on each later block."""
    length, window = case.length, case.window

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first_block = (kv <= q) & (kv < length)
        if case.documents:
            first_block = first_block & (documents[q] == documents[kv % length])
        if window is not None:
            first_block = first_block & (q - kv < window)
        return first_block | ((kv >= length) & ((kv - q) % length == 0))

    return visible


def _flex(query: Tensor, keys: Tensor, values: Tensor, *, block_mask: BlockMask) -> Tensor:
    return flex_attention(query, keys, values, block_mask=block_mask, enable_gqa=True)


def _flex_with_sinks(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, *, block_mask: BlockMask) -> Tensor:
    """A sink scales the output by exp(lse) / (exp(lse) + exp(sink))."""
    options = {"block_mask": block_mask, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    out, aux = flex_attention(query, keys, values, **options)
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(query.dtype)


if torch.cuda.is_available():
    # One graph per shape, as these shapes are; past the limit flex_attention would silently run unfused.
    torch._dynamo.config.recompile_limit = 256
    _flex = torch.compile(_flex, dynamic=False)
    _flex_with_sinks = torch.compile(_flex_with_sinks, dynamic=False)
    _create_block_mask = torch.compile(create_block_mask)
else:
    _create_block_mask = create_block_mask
