from faser_backend.serving.triton_model import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
