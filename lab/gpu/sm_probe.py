"""A kernel that tells on which SM each of its programs ran, and when, by the device's own clock."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid


@triton.jit
def sm_probe_kernel(sms, starts, ends, spin_ns):
    """One program per entry of sms, starts and ends; each keeps its SM busy for spin_ns."""
    program = tl.program_id(0)
    start = globaltimer()
    now = start
    while now - start < spin_ns:
        now = globaltimer()
    tl.store(sms + program, smid())
    tl.store(starts + program, start)
    tl.store(ends + program, now)


class Probe:
    """Tensors of one launch of `num_programs` programs."""

    def __init__(self, num_programs: int) -> None:
        self.sms = torch.full((num_programs,), -1, dtype=torch.int32, device="cuda")
        self.starts, self.ends = (torch.zeros(num_programs, dtype=torch.int64, device="cuda") for _ in range(2))

    def launch(self, spin_ns: int) -> None:
        """On the current stream. Eight warps a program, so that an SM holds few of them and all SMs are needed."""
        sm_probe_kernel[(self.sms.numel(),)](self.sms, self.starts, self.ends, spin_ns, num_warps=8)
