# ruff: noqa: PLR0917 (the arguments of a kernel, in its order)
"""References of all GPU kernels, in plain torch: readable, on any device, without regard to speed.

Kernels are tested against these. Launchers run them for tensors that are not on a GPU.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from torch.nn import functional


def pruned_chunk_attention(
    q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping, out, table_width=None,
    *, is_causal=True,
) -> None:  # fmt: skip
    """Lets row r of a sequence attend to its context in the pool, and to the rows of its chunk up to r, or all."""
    if table_width is not None:  # rows of the table lie without gaps
        num_sequences, width = context_lens.shape[0], int(table_width)
        block_table = block_table.flatten()[: num_sequences * width].view(num_sequences, width)
    for b, (begin, end) in enumerate(pairwise(cu_rows.tolist())):
        context, num_rows, chunk = int(context_lens[b]), end - begin, slice(begin, end)
        if num_rows == 0:
            continue
        token = torch.arange(context, device=q.device)
        block, offset = block_table[b, token // k_pool.shape[2]].long(), token % k_pool.shape[2]
        keys = torch.cat([k_pool[:, block, offset], k_new[chunk].transpose(0, 1)], 1).float()  # [Hkv, S, hd]
        values = torch.cat([v_pool[:, block, offset], v_new[chunk].transpose(0, 1)], 1).float()
        queries = q[chunk].float().unflatten(1, (keys.shape[0], -1))  # [rows, Hkv, G, hd]
        scores = torch.einsum("rkgd,ksd->rkgs", queries, keys) * q.shape[2] ** -0.5
        if is_causal:
            hidden = torch.ones(num_rows, context + num_rows, dtype=torch.bool, device=q.device).triu(context + 1)
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        out[chunk] = torch.einsum("rkgs,ksd->rkgd", scores.softmax(-1), values).flatten(1, 2).to(out.dtype)
    write_kv(k_new, v_new, slot_mapping[: int(cu_rows[-1])], k_pool, v_pool)


def write_kv(k_new, v_new, slot_mapping, k_pool, v_pool) -> None:
    """Writes keys and values [T, Hkv, hd] to their positions in the pools; a row with -1 is not written."""
    row = torch.nonzero(slot_mapping >= 0).flatten()
    slot = slot_mapping[row].long()
    block, offset = slot // k_pool.shape[2], slot % k_pool.shape[2]
    k_pool[:, block, offset] = k_new[row].transpose(0, 1)
    v_pool[:, block, offset] = v_new[row].transpose(0, 1)


def product(rows, weight, bias, out) -> None:
    """Computes out [T, N] = rows [T, K] @ weight [N, K]^T + bias [N]; float32 results are never rounded to less."""
    torch.mm(rows.to(out.dtype), weight.to(out.dtype).t(), out=out)
    if bias is not None:
        out += bias


def exit_scores(hidden, head, candidates, out) -> None:
    """Computes out[t, c] = hidden[t] . head[candidates[t, c]], summed in float32."""
    out.copy_(torch.einsum("td,tcd->tc", hidden.float(), head[candidates].float()))


def add_adapters(rows, adapters, first_entry, widths, out) -> None:
    """Adds (x @ a) @ b to rows of out with an adapter: its table and matrices are memory of the host."""
    for table in set(adapters.tolist()) - {0}:
        rank, *addresses = (ctypes.c_int64 * (1 + 2 * (first_entry + len(widths)))).from_address(table)
        chosen = adapters == table
        for entry, part in enumerate(out.split(list(widths), dim=1), first_entry):
            if addresses[2 * entry]:
                a, b = (
                    torch.frombuffer((ctypes.c_uint16 * (rank * size)).from_address(address), dtype=torch.float16)
                    for address, size in zip(addresses[2 * entry :], (rows.shape[1], part.shape[1]), strict=False)
                )
                lowered = rows[chosen].float() @ a.view(rank, -1).float().T
                part[chosen] = torch.addmm(part[chosen].float(), lowered, b.view(rank, -1).float()).to(out.dtype)


# Row kernels of a decoder layer. All arithmetic is float32, rounded once to the type of `out`.
def add_rms_norm(hidden, delta, weight, eps, summed, out) -> None:
    """Computes summed = hidden + delta in hidden's type, if there is a delta; out = RMS norm of the sum."""
    if delta is not None:
        hidden = torch.add(hidden, delta, out=summed)
    out.copy_(functional.rms_norm(hidden.float(), weight.shape, weight, eps))


def rotate_heads(qkv, positions, cos, sin, q_norm, k_norm, eps, num_heads, out) -> None:
    """Applies rotary embedding to queries and keys of qkv [T, H + 2 * Hkv, hd], behind norms if there are weights."""
    heads = qkv[:, : out.shape[1]].float()
    if q_norm is not None:
        weight = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(out.shape[1] - num_heads, -1)))
        heads = functional.rms_norm(heads, q_norm.shape, None, eps) * weight
    first, second = heads.chunk(2, dim=2)
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, hd / 2]
    out.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2))


def gated_silu(gate_up, out) -> None:
    """Computes out [T, I] = silu of the first half of gate_up [T, 2 * I] times the second."""
    gate, up = gate_up.float().chunk(2, dim=1)
    out.copy_(functional.silu(gate) * up)
