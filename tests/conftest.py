"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples on every machine, however slow it is: a failure is of the code, not of the day.
settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("same")
