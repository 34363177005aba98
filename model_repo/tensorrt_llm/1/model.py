from faser_backend.triton.model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
