"""A measurement and a price for the tests of `tpukit compare`."""

from tpukit.tools.measure.choice import Measurement, Price

RECIPE = dict(base_size=256, crop_size=256, lr=0.05)


def measurement(**other):
    fields = dict(hardware="T4", chips=1, cores=1, accelerator="cuda", place="Kaggle", precision="fp16")
    fields |= dict(date="2026-11-22", task="mshnet", recipe=RECIPE, samples=800, timed_steps=20)
    fields |= dict(batch_size=32, step_ms=100.0, step_ms_low=90.0, step_ms_high=110.0, wait_ms=1.0)
    return Measurement(**fields | other)


def price(hardware="T4", place="Google Cloud", usd=1.0, **other):
    return Price(hardware, place, usd, **other)
