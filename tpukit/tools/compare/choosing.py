"""The choice: which hardware finishes, in how many sessions, and what it costs. Pure functions of ways, prices and limits."""

import dataclasses
import math

from tpukit.tools import prices as price_table

WEEK_H = 168.0
MOST_SESSIONS = 10_000
SAVE_EVERY_S = 300.0  # between two checkpoints, as a workload has it unless told otherwise
ROUNDING_H = 1e-9  # sums of hours are exact to this: a rest that is smaller makes no session
AT_BEST, NOT_LISTED = "at best", "not in the table of prices"
MEASURED, PUBLISHED, BOUND = "measured", "published, not measured", "bound, by the compiler; not measured"
KINDS = (MEASURED, PUBLISHED, BOUND)
# How many chips a place lends at once; elsewhere as many as were measured.
CHIPS_AT = {("TPU v5e", "Kaggle"): 8, ("T4", "Kaggle"): 2, "Colab": 1, "Colab free": 1}


@dataclasses.dataclass(frozen=True)
class Way:
    """One kind of hardware on which the recipe could be trained, at the batch size that counts there."""

    hardware: str
    chips: int
    label: str
    kind: str
    """one of KINDS"""
    epoch_s: float
    """training alone: evaluations and checkpoints come on top"""
    batch_size: int | None = None
    start_s: float = 0.0
    """until the first step is done, in every session; 0 where it is not known"""
    memory_bytes: int | None = None
    place: str | None = None
    """where it was measured"""

    def hours(self, epochs):
        return epochs * self.epoch_s / 3600


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one way costs at one place. sessions, machine_h and calendar_h are None where it never ends there, sessions alone
    where the place's limits are not known."""

    way: Way
    place: str
    sessions: int | None
    machine_h: float | None
    calendar_h: float | None
    usd: float | None
    finishes: bool | None
    """None: nobody can say, because its cost or the place's limits are not known, or because a bound is at best reached"""
    why_not: str = ""

    @property
    def elsewhere(self):
        """The place where its way was measured, where that is another one; else ""."""
        own = self.way.place
        return own if self.way.kind == MEASURED and own and not _same_place(own, self.place) else ""


def sessions_needed(train_h, *, start_h=0.0, lost_h=0.0, session_h=None, week_h=None):
    """(sessions, hours on the machine, hours on the calendar) that a training takes, or None where it never ends.

    Every session first spends `start_h`; one that is cut off also loses `lost_h`, the work since the last checkpoint.
    session_h: its longest; week_h: hours a week, of which the first week begins with the training. The next session starts at
    once while the week has hours left.
    """
    session_h, week_h = session_h or math.inf, week_h if week_h and week_h < WEEK_H else math.inf
    now = used = used_this_week = done = 0.0
    sessions = weeks = 0
    while train_h - done > ROUNDING_H:
        length = min(session_h, week_h - used_this_week)
        needed = start_h + train_h - done
        too_short = needed > length + ROUNDING_H
        if too_short and length <= start_h + lost_h + ROUNDING_H:  # it would bring nothing
            if used_this_week == 0:
                return None
            weeks += 1
            now, used_this_week = weeks * WEEK_H, 0.0
            continue
        if not too_short:
            length, done = needed, train_h
        else:
            done += length - start_h - lost_h
        sessions += 1
        if sessions > MOST_SESSIONS:
            return None
        now, used, used_this_week = now + length, used + length, used_this_week + length
    return sessions, used, now


def choose(ways, prices, *, epochs, deadline_h=None, budget_usd=None, usd_per_kwh=None, spot=False):
    """A list of `Choice`, for every way and every place that has its hardware; those that finish first, cheapest first."""
    usd_per_kwh = price_table.USD_PER_KWH if usd_per_kwh is None else usd_per_kwh
    measured = [way for way in ways if way.kind == MEASURED]
    choices = []
    for way in ways:
        for price in _places(way, prices):
            if any(_speaks_for(other, way, price.place) for other in measured):
                continue
            lost_h = min(SAVE_EVERY_S, way.epoch_s) / 3600  # an epoch ends with a checkpoint
            limits = dict(session_h=price.session_h, week_h=price.week_h)
            found = sessions_needed(way.hours(epochs), start_h=way.start_s / 3600, lost_h=lost_h, **limits)
            if found is None:
                choices.append(Choice(way, price.place, None, None, None, None, False, "never ends within its sessions"))
                continue
            sessions, machine_h, calendar_h = found
            per_hour = price.per_hour(chips=way.chips, spot=spot, usd_per_kwh=usd_per_kwh)
            usd = None if per_hour is None else per_hour * machine_h
            why = []
            if deadline_h is not None and calendar_h > deadline_h:
                why.append("too late")
            if budget_usd is not None and usd is not None and usd > budget_usd:
                why.append("too expensive")
            finishes = not why
            if price.source == NOT_LISTED and price.place != "local":
                sessions = None
                why.append("limits not known")
            if finishes and budget_usd is not None and usd is None:
                why.append("cost not known")
            if finishes and not why and way.kind == BOUND:
                why.append(AT_BEST)
            if finishes and why:
                finishes = None
            choices.append(Choice(way, price.place, sessions, machine_h, calendar_h, usd, finishes, ", ".join(why)))
    order = {True: 0, None: 1, False: 2}
    return sorted(choices, key=lambda c: (order[c.finishes], KINDS.index(c.way.kind), *cost_then_time(c)))


def _same_place(one, other):
    return one.removesuffix(" free") == other.removesuffix(" free")


def _speaks_for(other, way, place):
    """Whether what another way measured at this place counts there, instead of what this one measured elsewhere."""
    same = (other.hardware, other.chips) == (way.hardware, way.chips) and other is not way and way.kind == MEASURED
    return same and _same_place(other.place or "local", place) and not _same_place(way.place or "local", place)


def cost_then_time(choice):
    return tuple(math.inf if value is None else value for value in (choice.usd, choice.calendar_h))


def _places(way, prices):
    """The rows of the price table that have this hardware in this number; the place where it was measured at any rate."""
    own = way.place or "local"
    found = []
    for price in prices:
        most = CHIPS_AT.get((price.hardware, price.place), CHIPS_AT.get(price.place, math.inf))
        # One CPU is not like another: what was measured on one says nothing of those elsewhere, and what was published, of none
        # here.
        same_machine = way.hardware != "CPU" or way.kind == MEASURED and price.place in (own, f"{own} free")
        if price.hardware == way.hardware and way.chips <= most and same_machine:
            found.append(price)
    if way.kind == MEASURED and way.place and own not in [price.place for price in found]:
        found.append(price_table.Price(way.hardware, own, None, None, None, None, None, "", NOT_LISTED))
    return found
