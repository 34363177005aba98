"""Reports the device's properties and what this machine can run."""

from __future__ import annotations

from faser_backend.cli.doctor import examine
from faser_backend.lab.gpu.harness import Context, Result


def device(context: Context) -> Result:
    """Returns the findings of `faser doctor`, and the device's properties."""
    found: Result = {"doctor": [{"name": each.name, "found": each.detail} for each in examine()]}
    context.save(found)
    if context.is_cuda:
        import torch

        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found["properties"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
            "memory_gib": total / 2**30,
            "free_gib": free / 2**30,
            "cuda": torch.version.cuda,
            "stream_priorities": list(torch.cuda.Stream().priority_range()),
        }
    return found
