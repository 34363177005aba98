from faser_backend.serving.triton_model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
