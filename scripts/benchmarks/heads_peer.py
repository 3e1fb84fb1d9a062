"""A head trained by SpecForge 0.2.0 on the documents that ours is trained on, for a comparison side by side.

Its own: draft model and initialisation, online model, strategy (steps weighted by 0.8^k), trainer core, optimizer
(fp32 masters) and schedule, normalisation and padding of samples, auxiliary layers, and the defaults of its recipe.
Nothing in it is patched. It runs in one process without FSDP, which shards nothing on one GPU. Ours: the prepared
documents, the draft vocabulary, the sizes of the head, and the target's forward, for which it needs a server; the
states come as that server delivers them, and their time counts.

Heads are saved as it exports them, in folders `step-N`, which `draftsmith evaluate --draft` reads; the figures are in
`heads_peer.json` beside them. On CPU (attention `sdpa`) its loss kernels need TRITON_INTERPRET=1.
"""

import argparse
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import calculate_time_spent
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from draftsmith import Eagle3DraftConfig
from draftsmith.data import DataArguments, d2t_to_t2d, draft_vocabulary_map, prepare_datasets
from draftsmith.target import FrozenTarget, load_target

from .common import Results, line, synchronize
from .loss_contenders import peer
from .train_contenders import specforge_config


HEADER = ("step", "tokens", "supervised", "seconds", "compiling", "loss", "accuracy")
WIDTHS = (8, 14, 14, 10, 10, 9, 10)
MAX_GRAD_NORM = 0.5  # of its defaults, as those of the arguments below


@dataclass(frozen=True)
class Document:
    input_ids: Tensor  # [n] int64
    loss_mask: Tensor  # [n] int64


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch._dynamo.config.patch(disable=device.type == "cpu"):  # where it would be compiled from C++
        run(args, device)


def run(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    model = load_target(args.target, dtype=dtype).to(device)
    layers = capture_layers(model.config)
    target = FrozenTarget(model, [layer + 1 for layer in layers])  # it counts layers, and means their outputs
    documents, d2t = read_documents(args, AutoTokenizer.from_pretrained(args.target), len(target.embedding_weight))
    draft = build_draft(args, target, layers, d2t)
    batches = plan([len(document.input_ids) for document in documents], args)
    core = build_core(args, draft, target, total_steps=len(batches))

    trained = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    chosen = vars(args) | {"target": Path(args.target).name, "data": [Path(name).name for name in args.data]}
    del chosen["output_dir"]
    results = Results(
        args.output_dir / "heads_peer.json", device, **chosen, max_grad_norm=MAX_GRAD_NORM, trained=trained,
        capture_layers=layers, documents=len(documents), steps=len(batches),
    )  # fmt: skip
    print(f"{trained:,} trained parameters, {len(documents):,} documents, {len(batches):,} steps")
    print(line(HEADER, WIDTHS, 0))
    for row in train(args, core, target, [[documents[index] for index in batch] for batch in batches]):
        name = f"step-{row['step']}"
        save(draft, args.output_dir / name)
        results.add({**row, "head": name})
        shown = (f"{row['step']:,}", f"{row['tokens']:,}", f"{row['supervised']:,}", f"{row['seconds']:.1f}",
                 f"{row['compile_seconds']:.1f}", f"{row['loss']:.3f}", f"{row['accuracies'][0]:.3f}")  # fmt: skip
        tqdm.write(line(shown, WIDTHS, 0))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py heads-peer", description=__doc__, formatter_class=formatter)
    parser.add_argument("--target", required=True, help="directory with config, weights and tokenizer")
    parser.add_argument("--data", required=True, nargs="+", help="conversations or prepared data, as for `train`")
    parser.add_argument("--output_dir", required=True, type=Path, help="new directory for heads and figures")
    parser.add_argument("--draft_vocab_size", type=int, help="default: the whole vocabulary")
    parser.add_argument("--ttt_steps", type=int, default=7)
    parser.add_argument("--fc_norm", action="store_true", help="an option of its own: a norm of each fused state")
    parser.add_argument("--epochs", type=int, help="over the documents (default: 1, or as many as --max_tokens needs)")
    parser.add_argument("--max_tokens", type=int, help="to train on, padding not counted")
    parser.add_argument("--batch_size", type=int, default=1, help="documents per step")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a document; the rest is cut off")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--warmup_ratio", type=float, default=0.015)
    parser.add_argument("--save_points", type=int, default=1, help="heads to save, evenly over the tokens")
    parser.add_argument("--attention_backend", default="flex_attention", choices=("flex_attention", "sdpa"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of target and head")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(arguments)
    if args.epochs is None and args.max_tokens is None:
        args.epochs = 1
    for name in ("epochs", "max_tokens", "batch_size", "save_points"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"`--{name}` is {value}: pass at least 1.")
    if args.output_dir.exists():
        parser.error(f"`--output_dir`: {args.output_dir} exists: name a new directory.")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("there is no GPU, and SpecForge's loss is a Triton kernel: set TRITON_INTERPRET=1.")
    peer("specforge")  # refuses here, before the target is loaded
    return args


def capture_layers(config: PreTrainedConfig) -> list[int]:
    """Its default: indices of the decoder layers whose outputs it captures."""
    no_choice = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layer_ids=None))
    resolve = peer("specforge.algorithms.model_providers").resolve_eagle_capture_layers
    return resolve(no_choice, {}, config.get_text_config(decoder=True))


def read_documents(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[list[Document], Tensor | None]:
    """The documents as we train on them, and the offsets `d2t` of the draft vocabulary that we would choose."""
    data_args = DataArguments(dataset=args.data, max_length=args.max_length, draft_vocab_size=args.draft_vocab_size)
    rows = prepare_datasets(data_args, tokenizer).train
    columns = rows.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
    documents = [
        Document(*(torch.from_numpy(row[name].astype(np.int64)) for name in ("input_ids", "loss_mask")))
        for row in tqdm(columns, desc="reading documents")
    ]
    return documents, draft_vocabulary_map(data_args, rows, vocab_size)


def plan(lengths: Sequence[int], args: argparse.Namespace) -> list[list[int]]:
    """Documents of each step, by index: shuffled anew for each epoch, incomplete batches dropped, as it does it."""
    if len(lengths) < args.batch_size:
        raise ValueError(f"`--batch_size` {args.batch_size} is more than the {len(lengths)} documents.")
    batches: list[list[int]] = []
    tokens = 0
    for epoch in count() if args.epochs is None else range(args.epochs):
        order = list(range(len(lengths)))
        random.Random(args.seed + epoch).shuffle(order)
        for start in range(0, len(order) - args.batch_size + 1, args.batch_size):
            batches.append(order[start : start + args.batch_size])
            tokens += sum(lengths[index] for index in batches[-1])
            if args.max_tokens is not None and tokens >= args.max_tokens:
                return batches
    return batches


def build_draft(args: argparse.Namespace, target: FrozenTarget, layers: list[int], d2t: Tensor | None) -> nn.Module:
    """A new head of its class and of our sizes, made as its `build_eagle3_draft` makes it."""
    text = target.text_config
    vocab_size = len(target.embedding_weight)
    sizes = Eagle3DraftConfig.from_target(
        text, draft_vocab_size=args.draft_vocab_size, vocab_size=vocab_size, aux_layer_ids=target.aux_layer_ids
    )
    config = specforge_config(
        sizes,
        longest=args.max_length + args.ttt_steps,
        initializer_range=sizes.initializer_range,
        pad_token_id=0 if sizes.pad_token_id is None else sizes.pad_token_id,
        bos_token_id=sizes.bos_token_id,
        eos_token_id=sizes.eos_token_id,
        architectures=["LlamaForCausalLMEagle3"],
        tie_word_embeddings=False,
        fc_norm=args.fc_norm,
        eagle_config={"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    )
    weight = target.embedding_weight
    draft = peer("specforge.modeling.auto").AutoDraftModel.from_config(
        config, attention_backend=args.attention_backend, torch_dtype=weight.dtype
    )
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(weight)
        if d2t is not None:
            draft.d2t.copy_(d2t)
            draft.t2d.copy_(d2t_to_t2d(d2t, vocab_size))
    draft.freeze_embedding()
    return draft.to(device=weight.device, dtype=weight.dtype)


def build_core(args: argparse.Namespace, draft: nn.Module, target: FrozenTarget, total_steps: int) -> Any:
    """Its `TrainerCore` of one step."""
    weight = target.head_weight
    online = peer("specforge.algorithms.eagle3.model").OnlineEagle3Model(
        draft_model=draft, length=args.ttt_steps, attention_backend=args.attention_backend
    )
    head = peer("specforge.modeling.target.target_head").TargetHead(args.target)
    head.fc.weight = nn.Parameter(weight, requires_grad=False)
    optimizer = peer("specforge.optimizer").BF16Optimizer
    backend_module = peer("specforge.training.backend")
    backend = backend_module.FSDPTrainingBackend(
        backend_module.ParallelConfig(),
        optimizer_factory=lambda module: optimizer(
            module, lr=args.learning_rate, max_grad_norm=MAX_GRAD_NORM, warmup_ratio=args.warmup_ratio,
            total_steps=total_steps,
        ),
    )  # fmt: skip
    backend.prepare_model(online.train(), wrap=False, optimizer_target=draft)
    strategy = peer("specforge.training.strategies.base").Eagle3TrainStrategy(online, target_head=head)
    return peer("specforge.training.controller").TrainerCore(strategy, backend)


def make_batch(documents: Sequence[Document], target: FrozenTarget, args: argparse.Namespace) -> Any:
    """Its `TrainBatch`: rows padded to the longest, with the target's states."""
    data = peer("specforge.algorithms.eagle3.data")
    lengths = [len(document.input_ids) for document in documents]
    ids = nn.utils.rnn.pad_sequence([document.input_ids for document in documents], batch_first=True)
    padding = torch.arange(ids.shape[1]) >= torch.tensor(lengths)[:, None]
    device = target.embedding_weight.device
    states = target(ids.to(device), document_ids=-padding.long().to(device))
    samples = [
        data.normalize_offline_sample(
            {
                "input_ids": document.input_ids,
                "loss_mask": document.loss_mask,
                "aux_hidden_state": states.aux_hidden_states[row : row + 1, :length],
                "hidden_state": states.last_hidden_state[row : row + 1, :length],
            },
            args.max_length,
        )
        for row, (document, length) in enumerate(zip(documents, lengths, strict=True))
    ]
    tensors = data.build_offline_collator()(samples)
    names = [str(row) for row in range(len(documents))]
    contracts = peer("specforge.runtime.contracts")
    return contracts.TrainBatch(names, "eagle3", tensors, {"target_repr": "hidden_state"})


def train(
    args: argparse.Namespace, core: Any, target: FrozenTarget, batches: Sequence[Sequence[Document]]
) -> Iterator[dict[str, Any]]:
    """All steps; at each save point the figures so far, and the loss and accuracies since the one before.

    While the caller holds the row, the clock stands still.
    """
    device = target.embedding_weight.device
    whole = sum(len(document.input_ids) for batch in batches for document in batch)
    seen = {"tokens": 0, "supervised": 0, "positions": 0}
    seconds, first, points = 0.0, 0.0, 0
    window: list[dict[str, float]] = []
    started, compiled = time.perf_counter(), calculate_time_spent()["total_wall_time"]
    for step, documents in enumerate(tqdm(batches, desc="training"), start=1):
        batch = make_batch(documents, target, args)
        window.append(core.train_step(batch).metrics)
        seen["tokens"] += sum(len(document.input_ids) for document in documents)
        seen["supervised"] += sum(int(document.loss_mask.sum()) for document in documents)
        seen["positions"] += batch.tensors["input_ids"].numel()
        if step == 1:
            synchronize(device)
            first = time.perf_counter() - started
        if seen["tokens"] * args.save_points < whole * (points + 1):
            continue
        points = seen["tokens"] * args.save_points // whole
        synchronize(device)
        seconds += time.perf_counter() - started
        yield {
            "step": step, **seen, "seconds": seconds, "first_step_seconds": first,
            "compile_seconds": calculate_time_spent()["total_wall_time"] - compiled,
            "loss": _mean(window, "loss"),
            "accuracies": [_mean(window, f"acc_{k}") for k in range(args.ttt_steps)],
        }  # fmt: skip
        window = []
        started = time.perf_counter()


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def save(draft: nn.Module, directory: Path) -> None:
    """As its `export_to_hf` writes a head, with the target's embedding; whole or not at all."""
    temporary = directory.with_name(f".unfinished-{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    draft.save_pretrained(temporary)
    peer("specforge.export.checkpoint_io").apply_legacy_rope_scaling(str(temporary))
    temporary.rename(directory)
