"""The smallest `faser profile`, for tests."""

from faser_backend.profiling.cases import Effort

BRIEF = Effort(0.2, 3, case_share=0.2, num_requests=16, num_steps=2)
