"""How many examples the property tests draw: few where they run with all others, many by hand.

The few are not made smaller where one fails, which takes minutes: ``HYPOTHESIS_PROFILE=many`` does that.
"""

import os

from hypothesis import Phase, settings

settings.register_profile("few", max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.register_profile("many", max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
