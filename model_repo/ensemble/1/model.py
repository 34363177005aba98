from faser_backend.serving.triton_model import FaceModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
