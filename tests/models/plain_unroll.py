"""The training loss of one unpacked document, written plainly: every row at every step, dense mask, dense softmax.

The truth that the model is compared with.
"""

import torch
import torch.nn.functional as F


def plain_loss(model, input_ids, aux, teacher, teacher_head, loss_mask, *, ttt_steps, decay=0.8, objective="kl"):
    """`input_ids` [T], `aux` [T, n * Ht], `teacher` [T, Ht], `loss_mask` [T] -> loss, {(row, step): logits [D]}."""
    config, length = model.config, len(input_ids)
    rows = length - 1  # row t reads feature t and token t + 1
    supervised = [_run_length(loss_mask, row + 1) for row in range(rows)]
    state = model.fuse(aux[:rows])  # [rows, H]
    keys, values, logits, total = [], [], {}, 0.0
    count = sum(run >= 2 for run in supervised)
    target_ids = model.to_target_ids(torch.arange(config.draft_vocab_size))
    for step in range(ttt_steps):
        alive = min(rows, length - 1 - step)  # beyond, there is no input token
        tokens = torch.cat([input_ids[1 + step :], input_ids.new_zeros(step)])[:rows]
        state, key, value = _layer(model, state, tokens, step, keys, values)
        keys.append(key), values.append(value)
        normed = model.norm(state)
        if config.norm_output:
            state = normed
        step_logits = normed @ model.lm_head.weight.T  # [rows, D]
        for row in range(alive):
            if supervised[row] >= step + 2:
                logits[row, step] = step_logits[row]
                full = teacher[row + 1 + step] @ teacher_head.T  # [V]
                total = total + decay**step * _pair_loss(
                    step_logits[row], full, target_ids, input_ids[row + 2 + step], objective
                )
    return total / max(count, 1), logits


def _run_length(loss_mask, start):
    run = 0
    while start + run < len(loss_mask) and loss_mask[start + run]:
        run += 1
    return run


def _layer(model, state, tokens, step, keys, values):
    layer, config, rows = model.midlayer, model.config, len(tokens)
    embeds = layer.input_layernorm(model.embed(tokens))
    normed = layer.hidden_norm(state)
    residual = normed if config.norm_before_residual else state
    hidden = torch.cat([embeds, normed], -1)
    attention, heads = layer.self_attn, config.num_attention_heads
    groups = heads // config.num_key_value_heads
    positions = torch.arange(rows) + step
    query = _rotate(model, attention.q_proj(hidden).view(rows, heads, -1), positions)
    key = _rotate(model, attention.k_proj(hidden).view(rows, heads // groups, -1), positions).repeat_interleave(
        groups, 1
    )
    value = attention.v_proj(hidden).view(rows, heads // groups, -1).repeat_interleave(groups, 1)
    all_keys, all_values = [*keys, key], [*values, value]
    row, column = torch.arange(rows)[:, None], torch.arange(rows)[None]
    window = config.sliding_window or 10**9
    scores = []
    for block, block_keys in enumerate(all_keys):  # the key of (row s, block j) stands at position s + j
        score = torch.einsum("qhd,khd->hqk", query, block_keys) * config.head_dim**-0.5
        visible = column <= row if block == 0 else column == row
        visible = visible & ((row + step) - (column + block) < window)
        scores.append(score.masked_fill(~visible, float("-inf")))
    weights = torch.cat(scores, -1).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, torch.cat(all_values)).reshape(rows, -1)
    output = residual + attention.o_proj(attended)
    return output + layer.mlp(layer.post_attention_layernorm(output)), key, value


def _rotate(model, states, positions):  # [rows, heads, d]
    rope = model.rotary_emb
    angles = positions[:, None] * rope.inv_freq.to(states.dtype)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] * rope.attention_scaling for f in (torch.cos, torch.sin))
    cos, sin = cos.float().to(states.dtype), sin.float().to(states.dtype)  # transformers computes the table in fp32
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def _pair_loss(draft_logits, full_logits, target_ids, label, objective):
    log_q = draft_logits.log_softmax(-1)
    if objective == "ce":
        match = (target_ids == label).nonzero()
        return -log_q[match[0, 0]] if len(match) else draft_logits.sum() * 0
    if full_logits.argmax() not in target_ids:
        return draft_logits.sum() * 0
    log_p = full_logits[target_ids].log_softmax(-1)
    divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    if objective == "kl":
        return divergence
    alpha = torch.minimum(full_logits.softmax(-1)[target_ids], log_q.exp()).sum()
    if objective == "tv":
        return 1 - alpha
    if objective == "lk_alpha":
        return -alpha.log()
    weight = torch.exp(-3 * alpha.detach())
    return weight * divergence + (1 - weight) * (1 - alpha)
