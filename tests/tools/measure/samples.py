"""Measurements, offers and prices for the tests of `tpukit compare`."""

from tpukit.tools.measure import BASES, Estimate, Measurement, Price


def row(batch_size=32, step_ms=100.0, **other):
    return dict(
        batch_size=batch_size,
        fits=True,
        timed_steps=20,
        compiled_late=0,
        memory_bytes=2**30,
        first_step_s=2.0,
        start_s=36.0,
        step_ms=step_ms,
        step_ms_low=step_ms,
        step_ms_high=step_ms,
        wait_ms=1.0,
        **other,
    )


def measurement(**other):
    fields = dict(
        tpukit="0.1.0",
        date="2026-11-22",
        hardware="T4",
        chips=1,
        accelerator="cuda",
        place="Kaggle",
        device="Tesla T4",
        cores=1,
        precision="fp16",
        python="3.12.0",
        versions={"torch": "2.11"},
        task="mshnet",
        recipe=dict(base_size=256, crop_size=256, lr=0.05),
        samples=800,
        rows=[row()],
    )
    return Measurement(**fields | other)


def estimate(hardware="T4", chips=1, epoch_s=90.0, basis=BASES[0], **other):
    return Estimate(hardware, chips, hardware, basis, epoch_s, **other)


def price(hardware="T4", place="Google Cloud", usd=1.0, **other):
    return Price(hardware, place, usd, **dict(as_of="2026-11", source="test") | other)
