from faser_backend.triton.model import TextModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
