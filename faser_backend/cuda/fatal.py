"""Which errors of a GPU stay: after them every call of the process fails, and it has to be started anew.

An illegal address, a fault of a kernel or of the hardware destroys the CUDA context that all streams share. Running
out of memory, a refused launch or a failed capture does not. Errors are told apart by CUDA's number where torch
passes it on, else by CUDA's own words, which Triton-language and TensorRT repeat.
"""

from __future__ import annotations

# cudaError_t of driver_types.h; the words are those of cudaGetErrorString.
FATAL_ERRORS = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    999: "unknown error",
}
_UNAMBIGUOUS = tuple(words.lower() for number, words in FATAL_ERRORS.items() if number != 999)


def is_fatal(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from or while handling, leaves the device of no use."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if getattr(each, "error_code", None) in FATAL_ERRORS or _names_a_fatal_error(str(each).lower()):
            return True
        pending += [each.__cause__, each.__context__]
    return False


def _names_a_fatal_error(message: str) -> bool:
    return "cuda" in message and any(words in message for words in _UNAMBIGUOUS)
