"""The kernel matrix: what real models' calls launch compiles for a GPU that nothing else here compiles for."""

from __future__ import annotations

from lab.gpu.kernel_matrix import CALLS, CAPABILITIES, MODELS, faults, kernel_rows


def test_a_decoding_step_of_smollm2_compiles_for_sm_100_within_its_device() -> None:
    rows = kernel_rows("smollm2-135m", 100, {"decoding": CALLS["decoding"]})
    assert {row["kernel"] for row in rows} == {
        *("add_rms_norm", "rotate_heads", "pruned_chunk_attention", "combine_splits", "gated_silu"),
        *("exit_scores", "perturb_logits"),
    }
    assert faults(rows) == []
    assert all(row["registers"] > 0 for row in rows)


def test_what_does_not_fit_is_said() -> None:
    row = {"model": "m", "sm": 90, "kernel": "k", "call": "decoding", "registers": 40, "spilled": 0, "shared": 0}
    assert faults([row]) == []
    for changed, words in (
        ({"spilled": 64}, "m, sm_90, k of decoding: 64 bytes spilled, at most 32"),
        ({"shared": 300_000}, "m, sm_90, k of decoding: 300000 bytes of shared memory, the limit is 232448"),
        ({"registers": 0}, "m, sm_90, k of decoding: 0 registers"),
    ):
        assert faults([row | changed]) == [words]


def test_the_matrix_has_every_architecture_and_the_largest_and_smallest_models() -> None:
    assert CAPABILITIES == (80, 90, 100, 120) and {"smollm2-135m", "qwen3-32b"} <= set(MODELS)
