"""A pytest plugin that spares the Triton-language interpreter (3.6.0) work without effect, most of its time.

It checks sums of integers for overflow, though these checks assert nothing unless `debug` is set. It patches the
language for each call of a function within a kernel, though the kernel's start can patch all of it.
"""

from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

patch = vars(interpreter)["_patch_lang"]
language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

vars(interpreter)["_patch_lang"] = lambda _: patch(language)
interpreter.InterpretedFunction.__call__ = lambda self, *given, **constants: self.rewrite()(*given, **constants)
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
