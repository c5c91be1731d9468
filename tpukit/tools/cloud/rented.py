"""What is rented now: requests and machines as gcloud lists them, whose they are, what they cost so far, when they end."""

import dataclasses
import datetime
import email.utils
import http.client
import re
import urllib.error
import urllib.request

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table, format_duration
from tpukit.tools.cloud.tpu_types import price_of

MARK = ("made-by", "tpukit")  # the label without which nothing is deleted
GRACE_MIN = 15  # so much later than planned a machine may be gone, before it counts as forgotten
EVERYWHERE = "-"  # what gcloud calls all zones
CLOCK = "https://tpu.googleapis.com"  # each of its answers carries the time, whatever else is in it

# State of a request -> what it means. READY and the like are states of a machine.
REQUESTS = {
    "CREATING": "the request is being looked at",
    "ACCEPTED": "in the queue until chips are free; costs nothing yet",
    "WAITING_FOR_RESOURCES": "in the queue until chips are free; costs nothing yet",
    "PROVISIONING": "chips are found, the machine starts",
    "ACTIVE": "the machine is there",
    "FAILED": "the request failed",
    "SUSPENDING": "the machine is being taken away",
    "SUSPENDED": "the machine was taken away; what is left is the request",
    "DELETING": "being deleted",
}
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")
OVER = ("FAILED", "SUSPENDING", "SUSPENDED")
TAKEN = ("PREEMPTED", "TERMINATED")  # states of a machine that Google took back; it costs nothing any more


@dataclasses.dataclass(frozen=True)
class Rented:
    """A request, its machine, or both."""

    name: str
    zone: str
    request: dict | None = None
    node: dict | None = None
    at: datetime.datetime | None = None
    """Google's time when it was looked at; None where that could not be had"""

    @property
    def labels(self):
        """Of each part that has any: the request carries those that its machine gets."""
        parts = [_spec(self.request).get("labels"), (self.node or {}).get("labels")]
        return [labels for labels in parts if labels]

    @property
    def ours(self):
        """Whether tpukit made it: by the label, on every part that shows labels."""
        return bool(self.labels) and all(labels.get(MARK[0]) == MARK[1] for labels in self.labels)

    def label(self, key, default=""):
        return next((labels[key] for labels in self.labels if key in labels), default)

    @property
    def accelerator(self):
        return ((self.node or {}).get("acceleratorType") or _spec(self.request).get("acceleratorType", "")).rpartition("/")[2]

    @property
    def state(self):
        asked = state_of(self.request)
        return self.node.get("state", "") if self.node and asked in ("", "ACTIVE") else asked

    @property
    def spot(self):
        return self.label("tpukit-capacity") == "spot"

    @property
    def minutes(self):
        """After so many minutes it deletes itself, as planned; None where no label says."""
        text = self.label("tpukit-minutes")
        return int(text) if text.isdigit() else None

    @property
    def since(self):
        """When the machine was made; None while there is none. It costs from then on."""
        return _time((self.node or {}).get("createTime"))

    @property
    def ends(self):
        return self.since + datetime.timedelta(minutes=self.minutes) if self.since and self.minutes is not None else None

    @property
    def forgotten(self):
        """Why it should not be there any more, or ""."""
        grace = datetime.timedelta(minutes=GRACE_MIN)
        if self.at and self.ends and self.state not in TAKEN and self.at > self.ends + grace:
            return "should have deleted itself, and still costs"
        over = "over, or taken away: it costs nothing, but holds its name and counts as quota"
        return over if self.state in (*OVER, *TAKEN) else ""

    def usd_so_far(self):
        """None where that is not known: it is not said when a machine was taken away, nor without Google's time."""
        if self.since is None:
            return 0.0
        if self.state in TAKEN or self.at is None:
            return None
        try:
            usd = price_of(self.accelerator, self.spot)[1]
        except TpukitError:
            return None
        return None if usd is None else usd * (self.at - self.since).total_seconds() / 3600

    def as_dict(self):
        asked = _time((self.request or self.node).get("createTime"))
        usd = self.usd_so_far()
        return dict(
            name=self.name,
            zone=self.zone,
            type=self.accelerator,
            capacity=self.label("tpukit-capacity"),
            state=self.state,
            asked_at=asked and asked.isoformat(timespec="seconds"),
            running_since=self.since and self.since.isoformat(timespec="seconds"),
            usd_so_far=None if usd is None else round(usd, 2),
            deletes_itself_at=self.ends and self.ends.isoformat(timespec="seconds"),
            forgotten=self.forgotten,
        )


def google_now():
    """The time by Google's clock, which decides what a machine costs and when it ends; None where it does not answer.
    This computer's own may be hours off."""
    try:
        try:
            with urllib.request.urlopen(urllib.request.Request(CLOCK, method="HEAD"), timeout=5) as answer:
                said = answer.headers["Date"]
        except urllib.error.HTTPError as error:  # an answer too
            said = error.headers["Date"]
        return email.utils.parsedate_to_datetime(said)
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return None


def state_of(request):
    return ((request or {}).get("state") or {}).get("state", "")


def find(cloud, zone=EVERYWHERE):
    """All requests and TPU machines of the project, ours and others, as a list of Rented. An empty one in a dry run."""
    parts = {}
    for request in cloud.read(*cloud.tpus("queued-resources", "list", zone=zone), instead=[]) or []:
        where, name = _place(request)
        node = next((spec["nodeId"] for spec in (request.get("tpu") or {}).get("nodeSpec", []) if spec.get("nodeId")), name)
        parts.setdefault((where, node), {}).update(name=name, request=request)
    for node in cloud.read(*cloud.tpus("tpu-vm", "list", zone=zone), instead=[]) or []:
        where, name = _place(node)
        part = parts.setdefault((where, name), {})
        part.update(name=part.get("name", name), node=node)
    at = google_now() if any("node" in part for part in parts.values()) else None
    return [Rented(zone=where, at=at, **part) for (where, _), part in sorted(parts.items())]


def check_clock(found):
    """Raises TpukitError where it is not known which of our machines are past their time."""
    if any(rented.ours and rented.node and not rented.at for rented in found):
        raise TpukitError(f"{CLOCK} does not answer with Google's time: which machines are past theirs is not known")


def find_ours(cloud, name, zone=""):
    """The one machine of that name that tpukit made. In a dry run a stand-in, in zone ZONE unless given."""
    check_name(name)
    everything = find(cloud, zone or EVERYWHERE)
    if cloud.dry_run:
        if not zone:
            print(f"# ZONE is where these lists show {name}")
        return Rented(name, zone or "ZONE")
    called = [rented for rented in everything if rented.name == name]
    ours = [rented for rented in called if rented.ours]
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise TpukitError(f"{name} is in several zones: {', '.join(rented.zone for rented in ours)}; choose with --zone")
    if called:
        raise TpukitError(
            f"{name} in {called[0].zone} does not carry the label {'='.join(MARK)}: tpukit did not make it, and leaves it alone"
        )
    others = ", ".join(rented.name for rented in everything if rented.ours) or "none"
    raise TpukitError(f"no machine {name!r} here; those that tpukit made: {others}. Others can be reached with gcloud alone")


def check_name(name):
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
        raise TpukitError(f"name {name!r}: small letters, digits and hyphens, a letter first, at most 50 of them")


def table(found):
    """The machines of tpukit, the forgotten ones first, and a line about the others."""
    ours = sorted((rented for rented in found if rented.ours), key=lambda rented: not rented.forgotten)
    rows = []
    for rented in ours:
        usd = rented.usd_so_far()
        ends = _clock(rented.ends) if rented.ends else ""
        if rented.ends and rented.at:
            ends += f" (in {format_duration((rented.ends - rented.at).total_seconds())})"
        if not rented.ends and rented.minutes is not None and not rented.forgotten:
            ends = f"{format_duration(60 * rented.minutes)} after it starts"
        rows.append(
            (
                rented.name,
                f"{rented.accelerator}{' spot' * rented.spot}",
                rented.zone,
                rented.state.lower().removesuffix("_for_resources"),
                format_duration((rented.at - rented.since).total_seconds()) if rented.since and rented.at else "",
                "unknown" if usd is None else f"${usd:.2f}",
                rented.forgotten or ends,
            )
        )
    columns = ("name", "type", "zone", "state", "runs since", "cost so far", "is to delete itself")
    lines = [str(Table("Rented by tpukit", columns, rows)) if rows else "tpukit has rented nothing in this project."]
    for rented in (r for r in ours if r.forgotten):
        lines.append(f"FORGOTTEN: {rented.name} ({rented.forgotten}): tpukit cloud delete {rented.name} --zone {rented.zone}")
    try:
        check_clock(found)
    except TpukitError as error:
        lines.append(str(error))
    if others := len(found) - len(ours):
        lines.append(f"{others} other{'s' * (others > 1)} without tpukit's label {'is' if others == 1 else 'are'} left alone.")
    return "\n".join(lines)


def _spec(request):
    """What a request says of its machine."""
    return next(iter(((request or {}).get("tpu") or {}).get("nodeSpec", [])), {}).get("node") or {}


def _place(resource):
    """(zone, name) of projects/P/locations/ZONE/.../NAME."""
    words = resource["name"].split("/")
    return words[3], words[-1]


def _time(text):
    """A time as Google writes it: 2026-11-22T10:00:00.123456789Z."""
    return datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text)) if text else None


def _clock(time):
    return f"{time.astimezone():%a %H:%M}"
