"""Compiles graphs of segments to TensorRT engines: `tensorrt_rtx` on any machine, `tensorrt` on the GPU it is for.

There is one strongly typed engine per segment, with an optimisation profile per bucket of calls and, if streams of SM
splits are given, per split. Errors that TensorRT only logs are raised.

Full TensorRT's attention plugins write KV pools in place, which it may not support. An engine's layer information lists
its layers, and the tensors that they read and write. Any other layer than a plugin's that touches a pool copies it in
every call.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import FLOAT_TYPES, CheckpointError
from faser_backend.engines.decoder import GraphForm, SegmentGraph, build_head, build_segment
from faser_backend.engines.eagle3 import DraftHead
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.tensorrt_buckets import TensorRtOptions, call_buckets, narrowed, shapes_of
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import BucketSpec, FileSpec, ModelEngine, SegmentSpec
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, NAMESPACE, Geometry
from faser_backend.plugins.tensorrt_import import ErrorLog, TensorRt, TensorRtError, import_tensorrt
from faser_backend.runtime_spec import RUNTIMES

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TensorRtCompiler:
    """A compiler of the segments of one engine directory.

    Making one raises TensorRtError if TensorRT is not installed or lacks the GPU that it needs, and CheckpointError for
    options that it does not support.
    """

    runtime: str
    dtype: str
    options: TensorRtOptions
    kv_block_size: int
    begin: Callable[[str], None]  # called before each step of `num_steps`

    def __post_init__(self) -> None:
        self.tensorrt: TensorRt = import_tensorrt(RUNTIMES[self.runtime].tensorrt)
        if self.tensorrt.flavour == "full":
            require_gpu(self.tensorrt.title)
        _check_options(self.tensorrt, self.options)
        if self.tensorrt.has_plugins:
            from faser_backend.plugins.tensorrt_aot import register_aot_plugins

            register_aot_plugins(self.tensorrt.module.__name__)

    def num_steps(self, num_segments: int, num_models: int, *, has_head: bool) -> int:
        """Returns the steps of writing all models. num_segments: a head counts as one."""
        return 2 * num_segments + has_head

    def write_model(
        self, name: str, spec: ModelSpec, weights: ModelWeights, cuts: tuple[int, ...], directory: Path
    ) -> ModelEngine:
        """Compiles the segments that end at layers `cuts`."""

        def segments(store: WeightStore) -> Iterator[tuple[int, int, SegmentGraph]]:
            for first, last in pairwise((0, *cuts)):
                self.begin(f"{name}: layers {first} to {last}")
                yield first, last, build_segment(spec, weights, store, first, last, form=self._form(spec))

        return self._compiled(name, spec, segments, directory)

    def write_head(
        self, head: DraftHead, weights: Mapping[str, ModelWeights], target: ModelEngine, directory: Path
    ) -> ModelEngine:
        """Compiles a draft head. It gets the target's embedding if it has none."""

        def segments(store: WeightStore) -> Iterator[tuple[int, int, SegmentGraph]]:
            self.begin("draft: EAGLE-3 head")
            if "embedding" not in weights["draft"]:
                store.add("embedding", weights["target"]["embedding"], FLOAT_TYPES[self.dtype])
            graphs = build_head(head, target.spec.hidden_size, weights["draft"], store, self._form(head.spec))
            yield from ((0, last, graph) for last, graph in enumerate(graphs))

        return self._compiled("draft", head.spec, segments, directory)

    def _form(self, spec: ModelSpec) -> GraphForm:
        geometry = plugin_geometry(spec, self.kv_block_size) if self.tensorrt.has_plugins else None
        return GraphForm(self.runtime, self.dtype, self.kv_block_size, geometry)

    def _compiled(
        self,
        name: str,
        spec: ModelSpec,
        segments: Callable[[WeightStore], Iterator[tuple[int, int, SegmentGraph]]],
        directory: Path,
    ) -> ModelEngine:
        """Writes graphs and their weights to a temporary folder, and compiles them into `directory`."""
        with tempfile.TemporaryDirectory(suffix=".onnx", dir=directory) as folder:
            store = WeightStore(Path(folder) / f"{name}.weights")
            written = tuple(
                graph.write(Path(folder) / f"{name}.{index}.onnx", first, last)
                for index, (first, last, graph) in enumerate(segments(store))
            )
            store.close()
            return self.compile_model(ModelEngine(spec, None, written), Path(folder), directory)

    def compile_model(self, model: ModelEngine, onnx_dir: Path, directory: Path) -> ModelEngine:
        """Compiles a model whose ONNX segments are in onnx_dir, as NAME.0.onnx and so on."""
        is_serial = model.spec.reads_target or model.spec.feature_layers  # heads and their targets never run at once
        splits = ("", *(() if is_serial else self.options.split_streams))  # the whole device first
        buckets = call_buckets(model.spec, self.kv_block_size, self.options.limits, splits)
        segments = []
        for segment in model.segments:
            path = directory / Path(segment.file.name).with_suffix(".engine").name
            used = tuple(narrowed(bucket, segment.inputs) for bucket in buckets)
            layers = f"layers {segment.first_layer} to {segment.last_layer}"
            is_join = segment.first_layer == segment.last_layer
            self.begin(f"{path.stem}: compile {'the join of hidden states' if is_join else layers}")
            self.compile_segment(onnx_dir / segment.file.name, segment, used, path)
            segments.append(replace(segment, file=FileSpec.of(path), buckets=used))
        return ModelEngine(model.spec, None, tuple(segments))

    def compile_segment(
        self, onnx_path: Path, segment: SegmentSpec, buckets: tuple[BucketSpec, ...], path: Path
    ) -> None:
        """Writes the engine of one ONNX file. Raises TensorRtError naming segment, stage and logged errors."""
        module, log = self.tensorrt.module, ErrorLog(self.tensorrt)
        builder = module.Builder(log.logger)
        network = parse_network(self.tensorrt, builder, log, onnx_path)
        config = self._config(builder)
        for bucket in buckets:
            config.add_optimization_profile(self.make_profile(builder, segment, bucket))
        log.check(f"{onnx_path.name}: options and profiles")
        # With plugins, an engine that can be inspected as it is, if this version builds one.
        is_open = self.tensorrt.has_plugins and hasattr(builder, "build_engine_with_config")
        build = builder.build_engine_with_config if is_open else builder.build_serialized_network
        engine = interruptible(module, config, lambda: build(network, config))
        if engine is None:
            raise log.fail(f"{onnx_path.name}: build", "TensorRT returned no engine and logged no error")
        log.check(f"{onnx_path.name}: build")
        if self.tensorrt.has_plugins:
            opened = engine if is_open else module.Runtime(log.logger).deserialize_cuda_engine(engine)
            try:
                check_no_copies(module, opened, path.name)
            except TensorRtError as error:
                if not self.options.allows_pool_copies:
                    raise
                _log.warning("%s", error)
        path.write_bytes(memoryview(engine.serialize() if is_open else engine))

    def _config(self, builder: Any) -> Any:
        module, config = self.tensorrt.module, builder.create_builder_config()
        config.max_aux_streams = 0  # auxiliary streams would leave the model's share of the device
        if self.dtype == "fp32":
            config.clear_flag(module.BuilderFlag.TF32)  # TF32 would round float32 operands
        if hasattr(module.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)  # RTX needs it to be captured in CUDA graphs
        aliased = getattr(module.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
        if self.tensorrt.has_plugins and aliased is not None:  # the plugin writes the pools in place
            config.set_preview_feature(aliased, True)
        if self.tensorrt.has_plugins:
            config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for the tensors that layers read
        targets = self.options.compute_capabilities
        if targets:
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                capability = getattr(module.ComputeCapability, f"SM{target.replace('.', '')}")
                config.set_compute_capability(capability, index)
        return config

    def make_profile(self, builder: Any, segment: SegmentSpec, bucket: BucketSpec) -> Any:
        """Makes the optimisation profile of a bucket of calls."""
        profile = builder.create_optimization_profile()
        for tensor in segment.inputs:
            profile.set_shape(tensor.name, *shapes_of(tensor, bucket))
        if bucket.split:
            streams = self.options.split_streams[bucket.split]
            profile.profile_stream = streams.draft if segment.file.name.startswith("draft.") else streams.target
        return profile


def parse_network(tensorrt: TensorRt, builder: Any, log: ErrorLog, onnx_path: Path) -> Any:
    """Parses an ONNX file with its weights beside it. Raises TensorRtError naming the nodes that it refuses."""
    module = tensorrt.module
    strongly_typed = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # absent: always
    network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
    parser = module.OnnxParser(network, log.logger)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        log.take_errors()
        reasons = "; ".join(f"{error.node_operator()} {error.node_name()}: {error.desc()}" for error in errors)
        raise TensorRtError(f"{onnx_path.name}: parse: {reasons or 'TensorRT logged no error'}")
    log.check(f"{onnx_path.name}: parse")
    # TensorRT may decompose attention if no fused kernel supports its type and shapes, as for fp32.
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == module.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = module.IAttentionOutputLayer
            layer.attention.decomposable = True
    return network


def interruptible(module: Any, config: Any, build: Callable[[], Any]) -> Any:
    """Builds on another thread, because TensorRT hides interrupts; one stops it, and is then raised."""
    is_stopped = threading.Event()

    class Monitor(module.IProgressMonitor):  # its base class exists only once the module is imported
        def phase_start(self, *_: Any) -> None: ...

        def step_complete(self, *_: Any) -> bool:
            return not is_stopped.is_set()

        def phase_finish(self, *_: Any) -> None: ...

    config.progress_monitor = Monitor()
    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(build).result()
        except KeyboardInterrupt:
            is_stopped.set()
            raise


def require_gpu(title: str) -> None:
    """Raises TensorRtError if torch finds no GPU, on which this TensorRT times kernels while it builds."""
    try:
        import torch
    except ImportError as error:
        raise TensorRtError(f"{title}: {error}; install it with pip install 'faser-backend[tensorrt]'") from None
    if not torch.cuda.is_available():
        raise TensorRtError(f"{title} builds on the GPU that its engines are for, but torch finds no GPU")


def _check_options(tensorrt: TensorRt, options: TensorRtOptions) -> None:
    known = tensorrt.compute_capabilities
    for target in options.compute_capabilities:
        if not known:
            raise CheckpointError(
                f"compute_capabilities = {target}: {tensorrt.title} builds only for this machine's GPU"
            )
        if target not in known:
            raise CheckpointError(f"compute_capabilities = {target}: must be one of {', '.join(known)}")
    if len(set(options.compute_capabilities)) != len(options.compute_capabilities):
        raise CheckpointError(f"compute_capabilities = {', '.join(options.compute_capabilities)}: lists one twice")
    if options.split_streams and not (tensorrt.has_plugins and tensorrt.has_profile_streams):
        raise CheckpointError(f"split_streams: {tensorrt.title} does not support SM splits")


# -- attention plugins ------------------------------------------------------------------------------------------------
POOL = re.compile(r"\b[kv]_pool(?:_out)?\.\d+\b")
REFORMAT = re.compile(r"reformat", re.IGNORECASE)
# In a layer's type, name, tactic, origin or metadata: which of them a version fills is not documented.
PLUGIN = re.compile(rf"plugin|{NAMESPACE}\b|{ATTEND_OP}|attend_splits", re.IGNORECASE)
MOST_NAMED = 3
# Rows of a sequence per program of a plugin: a verification of some draft tokens. Prompts' chunks use the same.
TILE_ROWS = 8


def plugin_geometry(spec: ModelSpec, kv_block_size: int) -> Geometry:
    """Returns the plugins' attributes for this machine's GPU, the only one that full TensorRT compiles for."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Geometry(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_block_size=kv_block_size,
        tile_rows=TILE_ROWS,
        num_sms=gpu.multi_processor_count,
        capability=10 * gpu.major + gpu.minor,
    )


def check_no_copies(module: Any, engine: Any, name: str) -> None:
    """Raises TensorRtError naming layers if `engine` copies pools, or may.

    module: tensorrt. engine: deserialised, with details or only names of layers.
    """
    information = engine.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
    try:
        layers: Any = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        layers = None
    advice = "use runtime torch, or --pool-copies allow, if the copies are none or bearable"
    if not isinstance(layers, list) or not layers:
        raise TensorRtError(
            f"{name}: inspect: the layer information names no layer; whether it copies KV pools is unknown; {advice}"
        )
    copies = [(layer, pools) for layer, pools in map(_moved_pools, layers) if pools]
    if copies:
        named = "; ".join(f"{layer} of {', '.join(pools)}" for layer, pools in copies[:MOST_NAMED])
        raise TensorRtError(
            f"{name}: {len(copies)} layers copy {len({pool for _, pools in copies for pool in pools})} KV pools in "
            f"every call, as {named}{'; ...' * (len(copies) > MOST_NAMED)}; {advice}"
        )


def _moved_pools(layer: Any) -> tuple[str, list[str]]:
    """Returns a layer's name and the pools that it copies. In a build without details, a layer is a name."""
    name, kind, tensors, texts = layer, "", [layer], [layer]
    if isinstance(layer, dict):
        name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
        tensors = [str(tensor.get("Name", "")) for side in ("Inputs", "Outputs") for tensor in layer.get(side) or ()]
        texts = [value for value in layer.values() if isinstance(value, str)]
    is_reformat = REFORMAT.match(name) or REFORMAT.match(kind)  # a reformat around a plugin has its name
    if not is_reformat and any(map(PLUGIN.search, texts)):
        return name, []
    return f"{name} ({kind})" if kind else name, list(
        dict.fromkeys(pool for tensor in tensors for pool in POOL.findall(tensor))
    )
