"""The types of TPU that Google Cloud rents: their images, their zones, their price."""

import dataclasses
import re

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table

PRICING = "https://cloud.google.com/tpu/pricing"


@dataclasses.dataclass(frozen=True)
class Generation:
    hardware: str
    """its name in the table of prices"""
    image: str
    """the machine image for PyTorch (Google's page "TPU software versions", read November 2026)"""
    cores_per_chip: int
    """what the number in a type's name counts: v5litepod-8 has 8 chips, v4-8 has 4"""
    zones: tuple[str, ...]
    """where it is rented out (Google's page "TPU regions and zones", and users' reports of 2026)"""


GENERATIONS = {
    "v5litepod": Generation(
        "TPU v5e", "v2-alpha-tpuv5-lite", 1, ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b")
    ),
    "v6e": Generation(
        "TPU v6e",
        "v2-alpha-tpuv6e",
        1,
        (
            "us-central1-b",
            "us-east1-d",
            "us-east5-a",
            "us-east5-b",
            "europe-west4-a",
            "asia-northeast1-b",
            "southamerica-west1-a",
        ),
    ),
    "v5p": Generation("TPU v5p", "v2-alpha-tpuv5", 2, ("us-central1-a", "us-east5-a", "europe-west4-b")),
    "v4": Generation("TPU v4", "tpu-ubuntu2204-base", 2, ("us-central2-b",)),
    "v3": Generation("TPU v3", "tpu-ubuntu2204-base", 2, ("us-central1-a", "us-central1-b", "europe-west4-a")),
    "v2": Generation("TPU v2", "tpu-ubuntu2204-base", 2, ("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c")),
}


def generation_of(accelerator):
    """The Generation of a type like v5litepod-8. Raises TpukitError for anything else."""
    found = re.fullmatch(r"(\w+)-([1-9]\d*)", accelerator)
    if not found or found[1] not in GENERATIONS:
        fix = "; a v5e is called v5litepod" if accelerator.startswith("v5e") else ""
        types = ", ".join(f"{name}-NUMBER" for name in GENERATIONS)
        raise TpukitError(f"accelerator {accelerator!r} is no TPU type that is known here: {types}{fix}")
    if int(found[2]) % GENERATIONS[found[1]].cores_per_chip:
        raise TpukitError(f"accelerator {accelerator!r}: the number counts cores, two a chip; take an even one")
    return GENERATIONS[found[1]]


def chips_of(accelerator):
    return int(accelerator.rpartition("-")[2]) // generation_of(accelerator).cores_per_chip


def zones_of(accelerator):
    """Words that say where a type is rented out."""
    try:
        zones = ", ".join(generation_of(accelerator).zones)
    except TpukitError:
        return "https://cloud.google.com/tpu/docs/regions-zones lists the zones of every type"
    ask = f"gcloud compute tpus accelerator-types list --zone=- --filter=type={accelerator}"
    return f"Zones with {accelerator}, as far as known here: {zones}; now: {ask}"


def price_of(accelerator, spot):
    """The row of the table of prices, and USD an hour of the whole machine (None where the table does not say)."""
    from tpukit.tools import prices

    price = prices.find(prices.read(), generation_of(accelerator).hardware, "Google Cloud")
    return price, price.per_hour(chips=chips_of(accelerator), spot=spot)


def cost_in_words(accelerator, spot, hours):
    """What so many hours cost, for people who are about to say yes."""
    price, usd = price_of(accelerator, spot)
    chips = chips_of(accelerator)
    what = f"{accelerator}: {chips} chip{'s' * (chips > 1)} of {price.hardware}, {'spot' if spot else 'on demand'}"
    if usd is None:
        return f"{what}. What it costs is not in tpukit's table of prices: {PRICING}"
    return (
        f"{what}. About ${usd:.2f} an hour, ${usd * hours:.2f} for the {hours:g} hours after which it is to delete "
        f"itself, from the moment it is there. (List price of {price.as_of}; yours depends on zone and contract: {PRICING})"
    )


def cost_table(accelerators, hours):
    """What so many hours of these types cost, on demand and as spare capacity."""

    def usd(accelerator, spot):
        each = price_of(accelerator, spot)[1]
        return "unknown" if each is None else f"${each * hours:.2f}"

    rows = [
        (name, chips_of(name), usd(name, False), usd(name, True), ", ".join(generation_of(name).zones)) for name in accelerators
    ]
    price, _ = price_of(accelerators[0], False)
    title = f"{hours:g} hours, list prices of {price.as_of}; yours depend on zone and contract: {PRICING}"
    return Table(title, ("type", "chips", "on demand", "spot", "zones, as far as known"), rows)
