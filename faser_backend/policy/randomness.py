"""What each draw of rejection sampling is for, so that no two draws share noise.

Rejection sampling keys its uniforms by (seed, position, purpose, round): never by position alone,
since a rejected position is drawn again in the next round.
"""

from __future__ import annotations

import numpy as np

PURPOSE_DRAFT = 1
PURPOSE_ACCEPT = 2
PURPOSE_RECOVER = 3


def sample_from(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Inverse-CDF draws. probs [R, V] >= 0 (not necessarily summing to 1), uniforms [R] in (0, 1).

    Returns token ids [R]; a token of probability 0 is never drawn.
    """
    cumulative = np.cumsum(probs, axis=-1, dtype=np.float64)
    return (cumulative > (uniforms * cumulative[:, -1])[:, None]).argmax(axis=-1)
