"""Checks SM splits: which SMs work for each share, launched and replayed, and whether two shares overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

from faser_backend.lab.gpu.harness import Context, Result

SPIN_NS = 20_000
LONG_SPIN_NS = 200_000
PROGRAMS_PER_SM = 16
NUM_TRIALS = 5


@triton.jit
def sm_probe_kernel(sms, starts, ends, spin_ns):
    """Keeps one SM busy for spin_ns per program; there is one program per entry of sms, starts and ends."""
    program = tl.program_id(0)
    start = globaltimer()
    now = start
    while now - start < spin_ns:  # pyright: ignore[reportOperatorIssue]
        now = globaltimer()
    tl.store(sms + program, smid())
    tl.store(starts + program, start)
    tl.store(ends + program, now)


class Probe:
    """The tensors of one launch of `num_programs` programs."""

    def __init__(self, num_programs: int) -> None:
        self.sms = torch.full((num_programs,), -1, dtype=torch.int32, device="cuda")
        self.starts, self.ends = (torch.zeros(num_programs, dtype=torch.int64, device="cuda") for _ in range(2))

    def launch(self, spin_ns: int) -> None:
        """Launches on the current stream, with eight warps a program so that all SMs are needed."""
        launch: Any = sm_probe_kernel[(self.sms.numel(),)]
        launch(self.sms, self.starts, self.ends, spin_ns, num_warps=8)


def run(context: Context) -> Result:
    """Measures every split of the menu: histograms of %smid, eager and replayed, and how long both shares overlap."""
    from faser_backend.cuda.green_contexts import load_driver
    from faser_backend.cuda.runtime import prepare_cuda
    from faser_backend.cuda.streams import open_menu

    if not prepare_cuda():
        raise RuntimeError(f"device = {context.device!r}: torch {torch.__version__} sees no GPU")
    torch.zeros(1, device="cuda")  # the primary context, which green contexts keep alive
    menu = open_menu(torch.cuda, 0, load_driver)
    found: Result = {"note": menu.menu.note, "splits": []}
    try:
        found["whole"] = _share_result(menu.menu.whole)
        del found["whole"]["seen"]
        for draft, target in menu.menu.splits:
            seen = {name: _share_result(share) for name, share in (("draft", draft), ("target", target))}
            draft_sms, target_sms = (set(seen[name].pop("seen")) for name in ("draft", "target"))
            checks = check_split(draft_sms, target_sms, draft.size, target.size)
            split = {"split": f"{draft.size}/{target.size}", **seen, "checks": checks, "is_right": all(checks.values())}
            found["splits"].append(split | {"together": _together(draft, target)})
            context.save(found)
    finally:
        torch.cuda.synchronize()
        menu.close()
    return found


def check_split(draft: set[int], target: set[int], draft_size: int, target_size: int) -> dict[str, bool]:
    """Returns properties that must hold of the SMs on which each share was seen."""
    return {
        "is_disjoint": not draft & target,
        "is_draft_within_size": len(draft) <= draft_size,
        "is_target_within_size": len(target) <= target_size,
        "is_draft_full": len(draft) == draft_size,
        "is_target_full": len(target) == target_size,
    }


def ranges(sms: set[int]) -> str:
    """Returns SM numbers as ranges: "0-1, 16"."""
    ordered = sorted(sms)
    firsts, lasts = ([sm for sm in ordered if sm + step not in sms] for step in (-1, 1))
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))


def _share_result(share: Any) -> dict[str, Any]:
    """Returns the SMs that ran a share's programs: launched on its stream, captured there and replayed elsewhere."""
    num_programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
    eager, replayed = Probe(num_programs), Probe(num_programs)
    torch.cuda.synchronize()
    with torch.cuda.stream(share.stream):
        eager.launch(SPIN_NS)
    share.stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=share.stream):
        replayed.launch(SPIN_NS)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    torch.cuda.synchronize()
    seen, seen_by_graph = (set(probe.sms.tolist()) for probe in (eager, replayed))
    return {
        "size": share.size,
        "seen": seen,
        "sms": ranges(seen),
        "num_sms_eager": len(seen),
        "is_graph_within_eager": seen_by_graph <= seen,
    }


def _together(draft: Any, target: Any) -> dict[str, float]:
    """Runs both shares for the same time, one launched right after the other. Returns the share of overlapping time."""
    probes = [(share, Probe(share.size)) for share in (draft, target)]
    shares = []
    torch.cuda.synchronize()
    for _ in range(NUM_TRIALS):
        for share, probe in probes:
            with torch.cuda.stream(share.stream):
                probe.launch(LONG_SPIN_NS)
        torch.cuda.synchronize()
        spans = [(float(probe.starts.min()), float(probe.ends.max())) for _, probe in probes]
        shares.append(overlap_of(*spans))
    return {"overlap_share_median": float(np.median(shares)), "overlap_share_min": float(min(shares))}


def overlap_of(draft: tuple[float, float], target: tuple[float, float]) -> float:
    """Returns the time of overlap over the shorter one's time; each argument is a start and an end."""
    shorter = min(end - start for start, end in (draft, target))
    common = min(draft[1], target[1]) - max(draft[0], target[0])
    return max(common, 0.0) / shorter if shorter else 0.0
