"""How many examples the property tests draw: few where they run with all others, many by hand."""

import os

from hypothesis import settings

settings.register_profile("few", max_examples=40, derandomize=True)
settings.register_profile("many", max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
