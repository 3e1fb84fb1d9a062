"""How many rows of logits exist at a time."""

import logging


logger = logging.getLogger(__name__)

MAX_LOGIT_ROWS = 8192  # of students and teacher together; beyond, matrix products gain nothing
# What the draft layer keeps per row for its own backward, in hidden sizes: the 2H attention input, q, k, v, attention
# output and residual (about 6), the MLP's input and three tensors of about 3.5H (about 12), and two norms.
LAYER_ACTIVATIONS = 20

_logged: set[tuple[int, int]] = set()


def choose_chunk_size(
    *,
    rows: int,
    hidden_size: int,
    logits_per_row: int,
    itemsize: int,
    stacked: int = 1,
    memory_budget: int | None = None,
) -> int:
    """The largest chunk whose logits need no more memory than the draft layer's backward, at least 1.

    Args:
        rows: rows the draft layer computes, all steps together.
        hidden_size: H; the layer's backward is estimated as rows * 20 * H elements.
        logits_per_row: logits that one row of a chunk brings into memory.
        itemsize: bytes per element of both.
        stacked: student rows per row of a chunk; `chunk * (stacked + 1)` stays below 8192.
        memory_budget: bytes to use instead of the estimate.
    """
    layer_bytes = rows * LAYER_ACTIVATIONS * hidden_size * itemsize if memory_budget is None else memory_budget
    row_bytes = logits_per_row * itemsize
    chunk = max(1, min(MAX_LOGIT_ROWS // (stacked + 1), layer_bytes // row_bytes))
    if (hidden_size, logits_per_row) not in _logged:
        _logged.add((hidden_size, logits_per_row))
        logger.info(
            "chunk_size=%d: logits of %.1f MiB, one decoder layer's backward %.1f MiB for %d rows",
            chunk, chunk * row_bytes / 2**20, layer_bytes / 2**20, rows,
        )  # fmt: skip
    return chunk
