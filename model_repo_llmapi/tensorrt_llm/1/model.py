from faser_backend.triton.model import LlmApiModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
