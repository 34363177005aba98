"""The engine of one process as the server sees it: built from options, stepped, measured, closed."""

from __future__ import annotations

from collections.abc import Callable

from faser_backend.core.config import EngineConfig
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import open_engine
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.serving.parameters import ServingOptions
from faser_backend.text.guides import GuideCompiler
from faser_backend.text.prompts import PromptFormat
from faser_backend.triton.link import Hello
from faser_backend.triton.long_texts import SeparateTokenizer
from faser_backend.triton.metrics import MetricReporter
from faser_backend.triton.tensor_values import default_text_bytes


class EngineHost:
    """Owns the loop. Raises ManifestError, ConfigError or FaserError where the engine cannot be served."""

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
        tokenizer_file = engine_dir.resolve() / manifest.tokenizer.name
        prompts = PromptFormat.load(
            engine_dir,
            manifest,
            chat_template_file=options.chat_template,
            adds_special_tokens=options.add_special_tokens,
        )
        self.tokenizer = SeparateTokenizer(tokenizer_file, prompts)
        engine, prepare = open_engine(engine_dir, config)
        self.hello = Hello(
            tokenizer_file=tokenizer_file,
            limits=engine.limits,
            end_ids=manifest.end_ids,
            max_queue_size=config.max_queue_size,
            out_of_vocab=options.out_of_vocab,
            excludes_input=options.exclude_input_in_output,
            cancellation_period_s=min(options.cancellation_check_period_ms, 100) / 1e3,
            prompts=prompts,
            kv_block_size=manifest.kv_block_size,
            takes_stop_requests=options.stop_requests != "off",
            max_text_bytes=options.max_text_bytes
            or default_text_bytes(engine.limits.max_context, self.tokenizer.longest_token),
        )
        self.loop = EngineLoop(
            engine,
            prepare=prepare,
            on_metrics=reporter.report,
            metrics_period_s=options.stats_check_period_ms / 1e3,
            on_finished=reporter.observe,
            on_stopped=on_stopped,
            beat=beat,
            guides=GuideCompiler(tokenizer_file, engine.limits.vocab_size, manifest.end_ids),
        )

    def close(self) -> None:
        self.loop.close()
        self.tokenizer.close()
