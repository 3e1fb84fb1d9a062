"""Metrics as raw sums: summed over batches and ranks first, divided last."""

from dataclasses import fields

import torch
from accelerate import Accelerator

from ..ops import DraftLossSums


class MetricSums:
    """Running sums of what the model reports, on its device, without synchronising."""

    def __init__(self):
        self._sums: dict[str, torch.Tensor] = {}  # each [K], or a scalar

    def add(self, raw_sums: DraftLossSums, *, keep: torch.Tensor | None = None, **scalars: torch.Tensor) -> None:
        """Add a batch's sums; where `keep`, a bool on the device, is false, its `scalars` only."""
        values = {item.name: getattr(raw_sums, item.name) for item in fields(raw_sums)}
        if keep is not None:
            values = {name: value if value is None else value.where(keep, 0) for name, value in values.items()}
        values |= scalars
        for name, value in values.items():
            if value is not None:
                value = value.detach().double() if value.device.type != "mps" else value.detach().float()
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduce(self, accelerator: Accelerator) -> dict[str, list[float]]:
        """The sums over all ranks as lists; empties this object. A collective: every rank calls it."""
        sums = {name: accelerator.reduce(value, "sum").reshape(-1).tolist() for name, value in self._sums.items()}
        self._sums = {}
        return sums


def draft_metrics(sums: dict[str, list[float]]) -> dict[str, float]:
    """Accuracy and alpha of each step, and the acceptance length that chains of hits along the data would have.

    `acceptance_length = 1 + sum_k chain_k / rows_k` is an estimate, since the paths follow the data.
    """
    metrics = {}
    for name, label in (("hits", "accuracy"), ("alpha", "alpha")):
        for step, (total, rows) in enumerate(zip(sums.get(name, ()), sums["rows"], strict=False)):
            metrics[f"step_{step}/{label}"] = total / rows if rows else 0.0
    chains = (chain / rows for chain, rows in zip(sums["chain"], sums["rows"], strict=True) if rows)
    metrics["acceptance_length"] = 1.0 + sum(chains)
    return metrics
