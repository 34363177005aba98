"""`python -m lab.peers`: its command line and its model formats."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile
from faser_backend.lab.peers import files
from tests.support.gguf_models import write_gguf
from tests.support.tiny_models import random_model


def test_all_layouts_hold_the_numbers_of_one_file(tmp_path: Path):
    source = tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    write_gguf(random_model("llama3_rope", rope_parameters=None, **sizes), source, kind=Type.Q4_1)
    wanted = GGUFCheckpoint(source)
    for weights, kind in (("fp16", Type.F16), ("int8", Type.Q8_0)):
        path = tmp_path / f"{weights}.gguf"
        files.write_gguf(path, source, weights)
        found = GGUFCheckpoint(path)
        assert {each.tensor_type for each in GGUFReader(path).tensors} == {kind, Type.F32}
        assert set(found.names) == set(wanted.names) and found.fields.values == wanted.fields.values
        errors = [float(np.abs(found.read(name) - wanted.read(name)).max()) for name in wanted.names]
        scale = max(float(np.abs(wanted.read(name)).max()) for name in wanted.names)
        assert max(errors) < scale / (1000 if weights == "fp16" else 200)
        assert weights == "fp16" or max(errors) > scale / 1000  # so the formats can be told apart
    files.write_checkpoint(tmp_path / "checkpoint", source)
    stored = SafetensorsFile(tmp_path / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(stored.read(name), wanted.read(name).astype(np.float16))
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["num_hidden_layers"] == wanted.fields.values["num_hidden_layers"]
