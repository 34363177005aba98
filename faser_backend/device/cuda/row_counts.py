"""How many rows calls of a GPU have whose graphs are captured. Knows nothing of torch."""

from __future__ import annotations

# Larger calls are computed for longer than they take to be queued, and their lengths hardly repeat: their rows
# are rounded up to a multiple of 8 alone, and no graph is captured.
MAX_GRAPH_ROWS = 512
# Powers of two and one or two steps between them: up to some hundred rows a GPU reads weights for as long as it
# computes, so that padding costs little.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, MAX_GRAPH_ROWS)
PROMPT_ROWS = 128  # from here on a call that wants no logits, as a prompt's chunk, has a shape of its own
FILTER_ROWS = 64  # that are sorted at once for top-k and top-p
