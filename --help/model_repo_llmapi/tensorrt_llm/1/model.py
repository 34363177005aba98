from faser_backend.serving.triton_model import LlmApiModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
