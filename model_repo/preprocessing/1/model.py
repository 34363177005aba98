from faser_backend.triton.model import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
