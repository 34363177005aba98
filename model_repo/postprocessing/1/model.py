from faser_backend.triton.model import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
