"""`python -m faser_backend.serving.model_configs`: the command's former name, from before the room `triton`."""

from runpy import run_module

if __name__ == "__main__":
    run_module("faser_backend.triton.model_configs", run_name="__main__")
