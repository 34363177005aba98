# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The kernel of a segment: layers of a decoder, and its head, as one compiled function that each thread of a call runs.

`cpu/runner.py` calls it with arrays and byte offsets. Threads share a call by columns of matrices, items of attention
and rows, with barriers in between; the interpreter does not run until the last layer is done. Every thread computes the
norms of few rows for itself, because a barrier would cost more; many rows are normalised and packed by all together.

A row's bits depend on its own inputs alone: `products` and `attention` guarantee it for themselves, and everything else
runs row by row through the same code.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba.misc.special import literally

from faser_backend.cpu.kernels.adapters import adapt
from faser_backend.cpu.kernels.attention import POOL_DTYPES, attend_item, write_rows
from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS, Kernel, compile_kernel, f32, i32, i64
from faser_backend.cpu.kernels.experts import ROUTING, mix_experts
from faser_backend.cpu.kernels.layouts import LANES
from faser_backend.cpu.kernels.matrix_units import PRODUCTS, has_matrix_units
from faser_backend.cpu.kernels.products import (
    ADDS,
    DOT_CODES,
    GROUP_FLOATS,
    NO_BIAS,
    REPLACES,
    STORED,
    TILE_ROWS,
    code_of,
    multiply,
    pack,
    read_column,
    score_columns,
    share_of,
)
from faser_backend.cpu.kernels.rows import gated_silu, inlined, normalise, normalise_rows, rotate
from faser_backend.cpu.kernels.threads import barrier_wait, take_item
from faser_backend.cpu.kernels.vectors import copy_row

# Indices of a layer's matrices and vectors in the kernel's tables of offsets; the offset of a missing vector is -1.
Q, K, V, ATTENTION_OUT, GATE, UP, DOWN = np.arange(7)  # typed, see NO_BIAS; with experts, those of experts.py from GATE
INPUT_NORM, MLP_NORM, Q_BIAS, K_BIAS, V_BIAS, ATTENTION_OUT_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(9)
Q_NORM, K_NORM, HIDDEN_NORM = 9, 10, 11
FEATURE = 12  # not a vector: the index among `features` that stores the layer's input, or -1
EMBEDDING, HEAD = 0, 1  # indices into end_matrices
FIRST_LAYER, LAST_LAYER, NUM_LAYERS, NORMALISES_SHARES, SEES_ALL = range(5)  # indices into `sizes`
SHARED_ROWS = 32  # threads normalise and pack more rows than these together
# The extra arguments of a kernel by kind of model: none, the routing of rows to experts, or inputs of an EAGLE-3 head.
DENSE, EXPERTS, EAGLE3_HEAD = "dense", "experts", "eagle3_head"
HEAD_INPUTS = numba.types.Tuple([
    f32[2],  # embedded [T, D], shared by the threads
    f32[2],  # inputs [T, 2 * D], per thread
])  # fmt: skip
EXTRAS = {DENSE: numba.types.Tuple([]), EXPERTS: ROUTING, EAGLE3_HEAD: HEAD_INPUTS}


def plain_code(weight_format: str, compute: str) -> int:
    """Returns the code of these products, one for both arithmetics where this CPU does the same: it spares a kernel."""
    code, exact = code_of(weight_format, compute), code_of(weight_format)
    is_other = weight_format in PRODUCTS[1] if has_matrix_units() else GROUP_FLOATS[code] != GROUP_FLOATS[exact]
    return code if is_other else exact


@cache
def segment_kernel(
    head_dim: int, pool_dtype: str, weight_formats: tuple[str, str, str], compute: str, kind: str = DENSE
) -> Kernel:
    """Returns the kernel for heads of head_dim values, a KV pool in pool_dtype and matrices in weight_formats.

    weight_formats: one of FORMATS each for the layers, the embedding and the head. compute: one of products.COMPUTES.
    kind: one of EXTRAS. The kernel is compiled once per CPU and stored on disk. Every thread of a call runs it with
    the same arrays and its own index and work space; all arrays are C-contiguous. Nothing is checked: shapes and
    indices that do not fit access foreign memory.
    """
    code, embedding_code, head_code = (plain_code(name, compute) for name in weight_formats)
    has_experts, is_head = kind == EXPERTS, kind == EAGLE3_HEAD  # constants of the kernel
    dots = int(code in DOT_CODES and head_dim % (2 * LANES) == 0)
    signature = numba.void(
        numba.int64, numba.int64, i64[1],  # thread, num_threads, barrier
        i64[1], i64[1], i64[1], i64[1], i64[2], i64[1], i64[2],  # token_ids .. candidates
        f32[2], f32[2], f32[2],  # hidden, logits, exit_scores
        f32[3], f32[3], f32[3], f32[3], f32[3], f32[2], f32[2], f32[2],  # features .. gathered
        f32[2], f32[1], f32[1], f32[1], i32[1], EXTRAS[kind],  # normed .. extras
        numba.types.Array(POOL_DTYPES[pool_dtype], 6, "C"),  # storage
        STORED, STORED, STORED, i64[2], i64[1],  # weights .. end_matrices
        f32[1], i64[2], f32[1],  # vectors, vector_offsets, last_norm
        f32[2], f32[2], i64[2], i64[1],  # cos, sin, items, sizes
        i64[2], i64[2], i64[2], f32[2],  # runs, logit_runs, adapters, lowered
        numba.float32, numba.float32, numba.boolean,  # eps, scale, has_scores
    )  # fmt: skip

    def kernel(
        thread,
        num_threads,
        barrier,  # threads.barrier_state
        token_ids,  # [T] of the first segment
        positions,  # [T]
        cu_rows,  # [B + 1]
        context_lens,  # [B]
        block_table,  # [B, MB]
        logit_rows,  # [R], rising
        candidates,  # [T, C] of a segment with exit scores
        hidden,  # [T, D]: the input, overwritten by the result; the last layer's is in the first R rows
        logits,  # [R, V]
        exit_scores,  # [T, C]
        features,  # [F, T, D]: inputs of the layers that a draft head reads
        q,  # [T, H, head_dim]: from here to `gathered`, work space that threads share
        k,  # [T, Hkv, head_dim]
        v,
        attended,  # [T, H, head_dim]
        gate,  # [T, I]; with experts [T * K, I]
        up,
        gathered,  # [R, H * head_dim]
        normed,  # [T, D]; shared by the threads if T > SHARED_ROWS
        packed,  # [products.packed_size(most inputs, T)], shared as `normed` is
        strip,  # [products.scratch_size(most inputs)]: from here to `pool_rows`, work space of this thread
        space,  # [attention.space_size(head_dim, heads of a KV head)]
        pool_rows,  # [2 * attention_vectors.COLUMNS]
        extras,  # see EXTRAS
        storage,  # [num_layers, 2, Hkv, NB, block, head_dim]: the pool
        weights,  # the weight file
        embedding_file,  # that with the embedding, and that with the head: a draft may use its target's
        head_file,
        matrices,  # [layers of the segment, matrices of a layer] bytes into it
        end_matrices,  # [2]
        vectors,  # norms and biases of all layers, concatenated
        vector_offsets,  # [layers of the segment, FEATURE + 1]
        last_norm,  # [D]
        cos,  # [max_context, head_dim / 2]
        sin,
        items,  # [N, 4] of attention, see runner.attention_items
        sizes,
        runs,  # see adapters.adapter_runs; from here to `lowered`, empty if no row has an adapter
        logit_runs,  # the same of the logit rows
        adapters,  # [A, columns], see adapters.RANK
        lowered,  # [2, T * largest rank]: work space that threads share
        eps,
        scale,
        has_scores,
    ):
        num_rows = hidden.shape[0]
        first_layer, num_layers = sizes[FIRST_LAYER], sizes[NUM_LAYERS]
        q_width, kv_width = q.shape[1] * head_dim, k.shape[1] * head_dim
        queries, mixed = q.reshape(num_rows, q_width), attended.reshape(num_rows, q_width)
        keys, values = k.reshape(num_rows, kv_width), v.reshape(num_rows, kv_width)
        crew, file, inputs = (thread, num_threads, barrier, num_rows > SHARED_ROWS), (weights, vectors, strip), normed
        if is_head:
            embedded, inputs = extras
            embed(embedding_code, embedded, token_ids, embedding_file, end_matrices[EMBEDDING], crew)
        elif first_layer == 0:
            embed(embedding_code, hidden, token_ids, embedding_file, end_matrices[EMBEDDING], crew)
        for layer in range(first_layer, sizes[LAST_LAYER]):
            own, at = matrices[layer - first_layer], vector_offsets[layer - first_layer]
            is_last = layer == num_layers - 1
            keep_rows(features, at[FEATURE], hidden, thread, num_threads)
            if is_head:
                prepare_both(code, packed, inputs, embedded, hidden, vectors, at, eps, num_rows, crew)
            else:
                prepare(code, packed, normed, hidden, vectors[at[INPUT_NORM] :], eps, num_rows, crew)
            tables = own, at, layer, runs, adapters, lowered
            for out, matrix in ((queries, Q), (keys, K), (values, V)):
                project(code, out, inputs, packed, matrix, REPLACES, num_rows, tables, crew, file)
            barrier_wait(barrier, num_threads)
            batch, rope = (block_table, cu_rows, context_lens), (positions, cos, sin, vectors, at, eps)
            attend(
                dots, q, k, v, (storage[layer, 0], storage[layer, 1]), batch, rope, attended, items, (space, pool_rows),
                scale, not is_last or logit_rows.size > 0, sizes[SEES_ALL], crew, head_dim,
            )  # fmt: skip
            barrier_wait(barrier, num_threads)
            if is_last:  # from here on only the logit rows matter
                num_rows = logit_rows.size
                if num_rows == 0:
                    return
                gather(gathered, mixed, hidden, logit_rows, crew)
                mixed, tables = gathered, (own, at, layer, logit_runs, adapters, lowered)
            pack_share(code, packed, mixed, num_rows, crew)
            project(code, hidden, mixed, packed, ATTENTION_OUT, ADDS, num_rows, tables, crew, file)
            barrier_wait(barrier, num_threads)
            prepare(code, packed, normed, hidden, vectors[at[MLP_NORM] :], eps, num_rows, crew)
            if has_experts:
                mix_experts(code, hidden, gate, up, normed, own, extras, num_rows, crew, file, sizes[NORMALISES_SHARES])
            else:
                feed_forward(code, hidden, gate, up, normed, packed, num_rows, tables, crew, file)
        if sizes[LAST_LAYER] == num_layers:
            prepare(head_code, packed, normed, hidden, last_norm, eps, num_rows, crew)
            multiply(
                head_code, logits, normed, packed, end_matrices[HEAD], NO_BIAS, REPLACES, num_rows, crew,
                (head_file, vectors, strip),
            )  # fmt: skip
        elif has_scores:
            normalise_rows(normed, hidden, last_norm, eps, 0, num_rows)
            score_rows(head_code, exit_scores, normed, end_matrices[HEAD], candidates, crew, file)

    return compile_kernel(kernel, signature)


@numba.njit(**WITHIN_KERNELS)
def embed(code, out, token_ids, weights, offset, crew):
    """Reads a thread's share of the tokens' embeddings; ends at a barrier."""
    code = literally(code)
    thread, num_threads, barrier, _ = crew
    for row in range(thread, token_ids.size, num_threads):
        read_column(code, out[row], weights, offset, token_ids[row])
    barrier_wait(barrier, num_threads)


@inlined
def keep_rows(features, index, hidden, thread, num_threads):
    """Copies a thread's share of hidden to features[index], unless index is -1."""
    if index >= 0:
        for row in range(thread, hidden.shape[0], num_threads):
            copy_row(features[index, row], hidden[row], hidden.shape[1])  # pyright: ignore[reportCallIssue]


@inlined
def gather(gathered, mixed, hidden, logit_rows, crew):
    """Copies the logit rows, which rise, of mixed to gathered and of hidden to its first rows; ends at a barrier."""
    thread, num_threads, barrier, _ = crew
    if thread == 0:
        for row in range(logit_rows.size):
            copy_row(gathered[row], mixed[logit_rows[row]], mixed.shape[1])  # pyright: ignore[reportCallIssue]
            copy_row(hidden[row], hidden[logit_rows[row]], hidden.shape[1])  # pyright: ignore[reportCallIssue]
    barrier_wait(barrier, num_threads)


@numba.njit(**WITHIN_KERNELS)
def score_rows(code, scores, normed, offset, candidates, crew, file):
    """Computes a thread's share of the logits of each row's candidates."""
    code = literally(code)
    (thread, num_threads, _, _), (weights, _, strip) = crew, file
    for row in range(thread, normed.shape[0], num_threads):
        score_columns(code, scores[row], normed[row : row + 1], weights, offset, candidates[row], strip)


@inlined
def rows_of(code, num_rows, crew):
    """Returns the rows [first, last) that this thread normalises and packs: all, or its share of whole tiles."""
    thread, num_threads, _, is_shared = crew
    if not is_shared:
        return 0, num_rows
    tiles = -(-num_rows // TILE_ROWS[code])
    first, last = tiles * thread // num_threads, tiles * (thread + 1) // num_threads
    return min(first * TILE_ROWS[code], num_rows), min(last * TILE_ROWS[code], num_rows)


@numba.njit(**WITHIN_KERNELS)
def pack_share(code, packed, rows, num_rows, crew):
    """Packs rows, or a thread's share of them; ends at a barrier if they are shared."""
    code = literally(code)
    _, num_threads, barrier, is_shared = crew
    first, last = rows_of(code, num_rows, crew)
    pack(code, packed, rows, first, last)
    if is_shared:
        barrier_wait(barrier, num_threads)


@numba.njit(**WITHIN_KERNELS)
def prepare(code, packed, normed, hidden, norm, eps, num_rows, crew):
    """Normalises rows and packs them; see pack_share."""
    code = literally(code)
    first, last = rows_of(code, num_rows, crew)
    normalise_rows(normed, hidden, norm, eps, first, last)
    pack_share(code, packed, normed, num_rows, crew)


@numba.njit(**WITHIN_KERNELS)
def prepare_both(code, packed, inputs, embedded, hidden, vectors, at, eps, num_rows, crew):
    """Normalises and packs the inputs of a head's layer: embeddings and hidden states side by side."""
    code = literally(code)
    first, last = rows_of(code, num_rows, crew)
    width, of_embedded, of_hidden = hidden.shape[1], vectors[at[INPUT_NORM] :], vectors[at[HIDDEN_NORM] :]
    for row in range(first, last):
        normalise(inputs[row, :width], embedded[row], of_embedded, eps)
        normalise(inputs[row, width:], hidden[row], of_hidden, eps)
    pack_share(code, packed, inputs, num_rows, crew)


@numba.njit(**WITHIN_KERNELS)
def project(code, output, inputs, packed, matrix, adds, num_rows, tables, crew, file):
    """Computes a thread's columns of output = (or +=) packed inputs @ matrix, bias and adapters included. tables: the
    layer's offsets of matrices and vectors, its index, and what `adapt` needs."""
    code = literally(code)
    own, at, layer, runs, adapters, lowered = tables
    multiply(code, output, inputs, packed, own[matrix], at[matrix + Q_BIAS - Q], adds, num_rows, crew, file)
    if runs.shape[0]:
        adapt(output, inputs, layer, matrix, runs, adapters, lowered, crew, file)


@numba.njit(**WITHIN_KERNELS)
def feed_forward(code, hidden, gate, up, normed, packed, num_rows, tables, crew, file):
    """Computes a thread's part of hidden += down(silu(gate(x)) * up(x)), x the prepared rows; ends at a barrier."""
    code = literally(code)
    thread, num_threads, barrier, _ = crew
    for out, matrix in ((gate, GATE), (up, UP)):
        project(code, out, normed, packed, matrix, REPLACES, num_rows, tables, crew, file)
    first, last = share_of(gate.shape[1], thread, num_threads)
    columns = slice(first * LANES, min(last * LANES, gate.shape[1]))
    for row in range(num_rows):
        gated_silu(gate[row, columns], up[row, columns])
    barrier_wait(barrier, num_threads)
    pack_share(code, packed, gate, num_rows, crew)
    project(code, hidden, gate, packed, DOWN, ADDS, num_rows, tables, crew, file)
    barrier_wait(barrier, num_threads)


@inlined
def attend(dots, q, k, v, pools, batch, rope, attended, items, work, scale, attends, sees_all, crew, head_dim):
    """Rotates queries and keys, writes keys and values to the pool and, if `attends`, computes `attended`.

    sees_all: 1 if a row also sees the rows of its sequence that are behind it, else 0.
    Tiles of one sequence read each other's rows, so all rows are written first. Without tiles, the thread that takes an
    item also writes its rows.
    """
    dots = literally(dots)
    (thread, num_threads, barrier, _), (block_table, cu_rows, context_lens) = crew, batch
    has_tiles = items.shape[0] > context_lens.size * k.shape[1]
    if has_tiles:
        for i in range(thread, items.shape[0], num_threads):
            write(q, k, v, pools, batch, rope, items[i], head_dim)
        barrier_wait(barrier, num_threads)
    i = take_item(barrier)
    while i < items.shape[0]:
        if not has_tiles:
            write(q, k, v, pools, batch, rope, items[i], head_dim)
        if attends:
            sequence, kv_head, first, num_rows = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
            position = context_lens[sequence] + first - cu_rows[sequence]
            least = sees_all * (context_lens[sequence] + cu_rows[sequence + 1] - cu_rows[sequence])
            attend_item(
                dots, q, pools[0], pools[1], block_table[sequence], position, first, num_rows, least, kv_head, attended,
                work[0], work[1], scale, head_dim,
            )  # fmt: skip
        i = take_item(barrier)


@inlined
def write(q, k, v, pools, batch, rope, item, head_dim):
    """Applies norms and the rotary embedding to an item's queries and keys, and writes its keys and values."""
    (block_table, cu_rows, context_lens), (positions, cos, sin, vectors, at, eps) = batch, rope
    sequence, kv_head, first, heads_per_kv = item[0], item[1], item[2], q.shape[1] // k.shape[1]
    rows = slice(first, first + item[3])
    for row in range(rows.start, rows.stop):
        row_cos, row_sin = cos[positions[row]], sin[positions[row]]
        for head in range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv):
            if at[Q_NORM] >= 0:
                normalise(q[row, head], q[row, head], vectors[at[Q_NORM] :], eps)
            rotate(q[row, head], row_cos, row_sin)
        if at[K_NORM] >= 0:
            normalise(k[row, kv_head], k[row, kv_head], vectors[at[K_NORM] :], eps)
        rotate(k[row, kv_head], row_cos, row_sin)
    position = context_lens[sequence] + first - cu_rows[sequence]
    write_rows(pools[0][kv_head], block_table[sequence], position, k[rows, kv_head], head_dim)
    write_rows(pools[1][kv_head], block_table[sequence], position, v[rows, kv_head], head_dim)
