"""Lets the real ONNX parser read an attention graph and prints the plugin that it makes for the first layer, as JSON.

For a process of its own: the bindings of TensorRT-RTX have the parser and the plugin registry of full TensorRT,
but cannot add a plugin to a network, and end the process when they are asked to. Usage: ONNX_FILE
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from plugins.tensorrt_contract import NAMESPACE
from plugins.tensorrt_import import import_tensorrt
from plugins.tensorrt_v3 import plugin_classes


def register(module: Any) -> None:
    base = plugin_classes(module)[1]

    class Creator(base):
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            plugin = base.create_plugin(self, name, fields, phase)
            print(json.dumps({"name": name, "is_build": plugin.is_build, **plugin.geometry.as_fields()}), flush=True)
            return plugin

    module.get_plugin_registry().register_creator(Creator(), NAMESPACE)


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module = import_tensorrt("rtx").module
    register(module)
    logger = module.Logger(module.Logger.ERROR)
    network = module.Builder(logger).create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    module.OnnxParser(network, logger).parse_from_file(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
