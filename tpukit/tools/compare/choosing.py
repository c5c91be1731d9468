"""The choice: which hardware finishes a training, in how many sessions, and at what cost. Pure functions."""

import dataclasses
import math

from tpukit.devices.chips import session_chips
from tpukit.tools.prices import Price
from tpukit.training.task import Task

WEEK_H = 168.0
ROUNDING_H = 1e-9  # sums of hours are exact to this
MAX_SESSIONS = 10_000  # a training that needs more of them never ends
# Full rate: the longer of the times that the compiler's FLOP and HBM bytes take at the full rates of the
# chip.
MEASURED, PUBLISHED, FULL_RATE = (
    "measured",
    "published, not measured",
    "full rate, by the compiler; not measured",
)
BASES = (MEASURED, PUBLISHED, FULL_RATE)  # the most trustworthy first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time of one epoch on one kind of hardware, and what that figure is based on."""

    hardware: str
    chips: int
    label: str
    basis: str  # one of BASES
    epoch_s: float  # of training alone, without evaluations and checkpoints
    batch_size: int | None = None
    start_s: float = 0.0  # from the start of a session to the end of its first step; 0 where it is not known
    memory_bytes: int | None = None
    place: str = ""  # where it was measured

    def hours(self, epochs):
        return epochs * self.epoch_s / 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """The whole training at one place. Figures are None where it never ends there or the price table does not
    know them."""

    estimate: Estimate
    place: str
    sessions: int | None = None
    machine_h: float | None = None
    calendar_h: float | None = None
    usd: float | None = None
    finishes: bool | None = False  # within deadline and budget; None where that is not certain
    why: str = ""  # it does not finish, or it is not certain

    @property
    def measured_elsewhere(self):
        """The place of the measurement where that is another one; else ""."""
        own = self.estimate.place
        return "" if _without_tier(own) == _without_tier(self.place) else own

    @property
    def cost_then_time(self):
        return [math.inf if value is None else value for value in (self.usd, self.calendar_h)]

    @property
    def time_then_cost(self):
        return self.cost_then_time[::-1]


def sessions_needed(train_h, *, start_h=0.0, lost_h=0.0, session_h=None, week_h=None):
    """(sessions, hours on the machine, hours on the calendar) of a training, or None where it never ends.

    Every session starts up for `start_h`. One that is cut off also loses `lost_h`, the work since its last
    checkpoint. A session lasts at most `session_h`, all sessions of a week at most `week_h`; what a week has
    left is not used where it is too short to train."""
    week_h = WEEK_H if week_h is None else min(week_h, WEEK_H)
    if week_h == WEEK_H:
        week_h = math.inf  # one week follows the other without a gap
    sessions = weeks = 0
    used_h = week_used_h = trained_h = 0.0
    while sessions < MAX_SESSIONS:
        length_h = min(session_h or math.inf, week_h - week_used_h)
        needed_h = start_h + train_h - trained_h
        if needed_h <= length_h + ROUNDING_H:
            return sessions + 1, used_h + needed_h, weeks * WEEK_H + week_used_h + needed_h
        if length_h > start_h + lost_h + ROUNDING_H:
            sessions, used_h, week_used_h = sessions + 1, used_h + length_h, week_used_h + length_h
            trained_h += length_h - start_h - lost_h
        elif week_used_h:
            weeks, week_used_h = weeks + 1, 0.0
        else:
            return None
    return None


def choose(estimates, prices, *, epochs, deadline_h=None, budget_usd=None, spot=False):
    """A `Candidate` for every estimate at every place that has its hardware; those that finish first, the
    cheapest first."""
    found = []
    for estimate in estimates:
        for price in _places(estimate, estimates, prices):
            limits = dict(session_h=price.session_h, week_h=price.week_h, lost_h=Task.save_every_s / 3600)
            needed = sessions_needed(estimate.hours(epochs), start_h=estimate.start_s / 3600, **limits)
            if needed is None:
                found.append(
                    Candidate(estimate=estimate, place=price.place, why="never ends within its sessions")
                )
                continue
            sessions, machine_h, calendar_h = needed
            usd_per_hour = price.per_hour(chips=estimate.chips, spot=spot)
            usd = None if usd_per_hour is None else usd_per_hour * machine_h
            exceeded, unknown = [], []
            if deadline_h is not None and calendar_h > deadline_h:
                exceeded.append("too late")
            if budget_usd is not None and usd is not None and usd > budget_usd:
                exceeded.append("too expensive")
            if price not in prices and price.place != "local":
                sessions = None
                unknown.append("limits not known")
            if budget_usd is not None and usd is None:
                unknown.append("cost not known")
            finishes = None if unknown or estimate.basis == FULL_RATE else True
            figures = dict(sessions=sessions, machine_h=machine_h, calendar_h=calendar_h, usd=usd)
            verdict = dict(finishes=False if exceeded else finishes, why=", ".join(exceeded + unknown))
            found.append(Candidate(estimate=estimate, place=price.place, **figures, **verdict))
    order = (True, None, False)
    return sorted(
        found, key=lambda c: [order.index(c.finishes), BASES.index(c.estimate.basis), *c.cost_then_time]
    )


def _places(estimate, estimates, prices):
    """The prices of the places that have this hardware in this number, and of the place where it was
    measured."""
    hardware = estimate.hardware, estimate.chips
    measured_at = {
        _without_tier(other.place) for other in estimates if (other.hardware, other.chips) == hardware
    }
    found = []
    for price in prices:
        limit = session_chips(price.hardware, price.place)
        if price.hardware != estimate.hardware or limit is not None and estimate.chips > limit:
            continue
        place = _without_tier(price.place)
        # One CPU says nothing of another; and what was measured at a place counts there.
        only_own = estimate.hardware == "CPU" or estimate.basis == MEASURED and place in measured_at
        if place == _without_tier(estimate.place) or not only_own:
            found.append(price)
    if estimate.place and estimate.place not in [price.place for price in found]:
        found.append(Price(estimate.hardware, estimate.place, source="not in the price table"))
    return found


def _without_tier(place):
    return place.removesuffix(" free")
