"""Metrics of Triton that stay registered when the process that opened them ends."""

from __future__ import annotations

import ctypes
from typing import Any


class LastingFamily:
    """A family of metrics. It and its metrics are never destroyed by the process that opens them.

    Destroying one tells the server to take it out of its registry. Two engines hold metrics of the same labels while
    one replaces the other, and Triton gives both the same metric: the end of the first would free what the second one
    counts in, and the server with it. A family that has one of Triton's own names would take that from the model that
    it belongs to. And when a process ends, the queue that would tell of it is gone before Python's objects are, which
    is a fault.
    """

    def __init__(self, pb_utils: Any, kind: str, name: str, description: str) -> None:
        """kind: `COUNTER`, `GAUGE` or `HISTOGRAM`. pb_utils: Triton's Python module."""
        kinds = pb_utils.MetricFamily
        self._family = _keep(kinds(name=name, description=description, kind=getattr(kinds, kind)))

    def metric(self, labels: dict[str, str], **more: Any) -> Any:
        """The metric of these labels, Triton's own where it has one. more: as Triton's `Metric` has it."""
        return _keep(self._family.Metric(labels=labels, **more))


def _keep(held: Any) -> Any:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return held
