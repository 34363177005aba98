from faser_backend.serving.triton_model import TextModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
