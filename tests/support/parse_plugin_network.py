"""Reads an attention graph with the real ONNX parser, and prints the first plugin's attributes as JSON.

Runs in its own process: the bindings of TensorRT-RTX have full TensorRT's parser and plugin registry, but cannot add a
plugin to a network. Usage: ONNX_FILE
"""

import json
import os
import sys
from typing import Any

import numpy as np

from faser_backend.plugins.tensorrt_contract import ATTEND_OP, GEOMETRY_FIELDS, NAMESPACE, VERSION
from faser_backend.plugins.tensorrt_import import import_tensorrt


def register(module: Any) -> None:
    class Creator(module.IPluginCreatorV3One):
        def __init__(self) -> None:
            module.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = ATTEND_OP, VERSION, NAMESPACE
            self.numbers = {name: np.array([], np.int64) for name in GEOMETRY_FIELDS}  # kept alive only here
            kind = module.PluginFieldType.INT64
            fields = [module.PluginField(name, array, kind) for name, array in self.numbers.items()]
            self.field_names = module.PluginFieldCollection(fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            print(json.dumps({field.name: int(np.asarray(field.data).reshape(-1)[0]) for field in fields}), flush=True)
            os._exit(0)

    module.get_plugin_registry().register_creator(Creator(), NAMESPACE)


def main(path: str) -> None:
    module = import_tensorrt("rtx").module
    register(module)
    logger = module.Logger(module.Logger.ERROR)
    network = module.Builder(logger).create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    module.OnnxParser(network, logger).parse_from_file(path)


if __name__ == "__main__":
    main(sys.argv[1])
