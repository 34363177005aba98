from faser_backend.serving.triton_model import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
