"""Opens the engine of a served model from the options, and closes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import open_engine
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.parameters import ServingOptions
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.link import Handshake
from faser_backend.triton.metrics import MetricReporter


class EngineHost:
    """Owns the engine's loop. Raises ManifestError, ConfigError or FaserError if the engine cannot be served."""

    def __init__(
        self,
        options: ServingOptions,
        config: EngineConfig,
        reporter: MetricReporter,
        on_stopped: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """on_stopped, beat: see EngineLoop."""
        engine_dir = options.engine_dir or demo_engine_dir()
        manifest = EngineManifest.load(engine_dir)
        if options.max_tokens_in_paged_kv_cache is not None and config.num_kv_blocks is None:
            num_blocks = max(1, options.max_tokens_in_paged_kv_cache // manifest.kv_block_size)
            config = config.model_copy(update={"num_kv_blocks": num_blocks})
        folder = engine_dir.resolve()
        name = options.model_name or folder.name
        if name in config.adapters:
            raise ConfigError(f"lora = {name!r}: must not be the name of the model itself")
        prompts = PromptFormat.load(
            engine_dir,
            manifest,
            chat_template_file=options.chat_template,
            adds_special_tokens=options.add_special_tokens,
        )
        self._tokenizer = TextTokenizer.from_file(folder / manifest.tokenizer.name, prompts)
        engine = open_engine(engine_dir, manifest, config)
        model = ServedModel.of(name, manifest, engine.limits, self._tokenizer, options.max_text_bytes)
        self.handshake = Handshake(
            replace(model, adapters=tuple(config.adapters)),
            max_queue_size=config.max_queue_size,
            out_of_vocab=options.out_of_vocab,
            excludes_input=options.exclude_input_in_output,
            cancellation_period_s=min(options.cancellation_check_period_ms, 100) / 1e3,
            takes_stop_requests=options.stop_requests != "off",
        )
        self.loop = EngineLoop(
            engine, on_metrics=reporter.report, metrics_period_s=options.stats_check_period_ms / 1e3,
            on_finished=reporter.observe, on_stopped=on_stopped, beat=beat,
            guides=self.handshake.model.guide_compiler(),
        )  # fmt: skip

    def close(self) -> None:
        self.loop.close()
        self._tokenizer.close()
