"""Creating, listing and deleting TPU machines."""

import contextlib
import json
import re
import secrets
import signal
import sys
import threading
import time

from tpukit.host.errors import TpukitError
from tpukit.tools.cloud import rented, running
from tpukit.tools.cloud.gcloud import Gcloud, GcloudError, line
from tpukit.tools.cloud.guard import guard_script
from tpukit.tools.cloud.skypilot import SOURCE, is_unfilled
from tpukit.tools.cloud.tpu_types import cost_in_words, generation_of, zones_of

POLL_S = 15
HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)
SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # what the machine needs to delete itself; IAM says what it may do


def create(
    name: str = "tpukit",
    /,
    *,
    accelerator: str = "v5litepod-1",
    zone: str = "us-central1-a",
    spot: bool = False,
    hours: float = 4.0,
    wait_hours: float = 1.0,
    service_account: str = "",
    project: str = "",
    yes: bool = False,
    dry_run: bool = False,
):
    """Rent a TPU machine, or a slice of several hosts: says what it costs, asks, requests it, and waits until it is there.

    It is set to delete itself after --hours, whatever runs on it then, and does where its account may. An interrupt while it
    waits deletes the request.

    Args:
        name: what the machine is called.
        accelerator: a TPU type with its number: chips for v5litepod (v5e) and v6e, cores (two a chip) for v5p and v4.
        zone: where. Not every zone has every type.
        spot: spare capacity: cheaper, and can be taken away at any time, with what is on it.
        hours: the machine is to delete itself after so many hours.
        wait_hours: so long the request may wait for free chips; then it is deleted.
        service_account: whom the machine acts as, to delete itself (roles/tpu.admin); the project's default unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        yes: do not ask.
        dry_run: print the commands, and run none.
    """
    rented.check_name(name)
    generation = generation_of(accelerator)
    _check(zone, hours, wait_hours, service_account)
    print(cost_in_words(accelerator, spot, hours))
    if zone not in generation.zones:
        print(f"{zone} is not among the zones that are known to have it. {zones_of(accelerator)}")
    if is_unfilled(SOURCE):
        print(
            "This copy of tpukit knows no repository of its own: `tpukit cloud run` will need --source, what pip is to install"
        )
    cloud = Gcloud(project, dry_run)
    for other in rented.find(cloud, zone):
        if other.name == name:
            raise TpukitError(
                f"{name} is there already, in {zone}, {other.state}: choose another name, or delete that one first"
            )
    confirm(f"Rent {name} in {zone} of project {cloud.project}?", yes or dry_run)
    request = _Request(cloud, name, zone)
    words = request.words(accelerator, spot=spot, hours=hours, wait_hours=wait_hours, service_account=service_account)
    if not dry_run:
        print("asking Google for it; an interrupt takes it back, or says what it could not take back", flush=True)
    request.make(words, wait_hours * 3600)
    if not dry_run:
        print(
            f"{name} is there and costs money from now on. It is set to delete itself in {hours:g} hours, if its account may; "
            f"sooner: tpukit cloud delete {name}\n"
            "Whether its account lets it look at itself, `tpukit cloud run` shows; whether it deleted itself, "
            "`tpukit cloud list`\n"
            f"  tpukit cloud run {name} -- train mshnet ...   tpukit cloud open {name}   tpukit cloud list"
        )


def listing(*, zone: str = "", project: str = "", json: bool = False, dry_run: bool = False):
    """What is rented in all zones: with its cost so far and when it deletes itself; what was forgotten comes first.

    Args:
        zone: look in this zone alone.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        json: print a JSON list, for machines.
        dry_run: print the commands, and run none.
    """
    cloud = Gcloud(project, dry_run)
    found = rented.find(cloud, zone or rented.EVERYWHERE)
    if dry_run:
        return
    print(_as_json([r.as_dict() for r in found if r.ours]) if json else rented.table(found))


def delete(
    name: str = "",
    /,
    *,
    expired: bool = False,
    fetch: bool = False,
    zone: str = "",
    project: str = "",
    yes: bool = False,
    dry_run: bool = False,
):
    """Delete a machine that tpukit made, with its request, and look that it is gone. Others are left alone.

    Args:
        name: what the machine is called.
        expired: all that were forgotten: machines past their time, and requests that are over.
        fetch: bring the run back first; where that fails, nothing is deleted.
        zone: where; it is looked for in all zones unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        yes: do not ask.
        dry_run: print the commands, and run none.
    """
    if bool(name) == expired:
        raise TpukitError("`tpukit cloud delete` needs a name, or --expired for all that were forgotten (tpukit cloud list)")
    cloud = Gcloud(project, dry_run)
    if expired and dry_run:
        rented.find(cloud, zone or rented.EVERYWHERE)
        print("# and for each NAME and ZONE that was forgotten:")
        machines = [rented.Rented("NAME", zone or "ZONE")]
    elif expired:
        found = rented.find(cloud, zone or rented.EVERYWHERE)
        rented.check_clock(found)
        machines = [r for r in found if r.ours and r.forgotten]
        if not machines:
            print("nothing was forgotten")
            return
    else:
        machines = [rented.find_ours(cloud, name, zone)]
    if not dry_run:
        for machine in machines:
            usd = machine.usd_so_far()
            cost = "" if not usd else f", about ${usd:.2f} so far"
            print(f"{machine.name}: {machine.accelerator} in {machine.zone}, {machine.state}{cost}")
        lost = "" if fetch else " What is on it and was not fetched (tpukit cloud fetch, or --fetch) is lost."
        confirm(f"Delete {' and '.join(m.name for m in machines)}?{lost}", yes)
    errors = []
    for machine in machines:
        try:
            if fetch and machine.state in (*rented.OVER, *rented.TAKEN):
                print(f"{machine.name} is {machine.state}: there is nothing to fetch any more")
            elif fetch and (machine.node or dry_run):
                running.fetch_run(cloud, machine)
            delete_checked(cloud, machine.name, machine.zone)
        except TpukitError as error:  # the others are deleted all the same
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else TpukitError("\n".join(str(error) for error in errors))


def delete_checked(cloud, name, zone):
    """Look again whose it is, delete it, and look whether it is gone."""
    there = look(cloud, name, zone)
    if not cloud.dry_run and not there.request and not there.node:
        _tell(f"{name} is gone")
        return
    if not cloud.dry_run and not there.ours:
        raise TpukitError(f"{name} in {zone} does not carry the label {'='.join(rented.MARK)}: it is left alone")
    tries = 1 if cloud.dry_run else 20
    for attempt in range(tries):
        if there.request or cloud.dry_run:
            _delete_part(cloud, "queued-resources", name, zone, "--force")
        elif there.node:
            _delete_part(cloud, "tpu-vm", name, zone)
        there = look(cloud, name, zone)
        if not there.request and not there.node:
            if not cloud.dry_run:
                _tell(f"{name} is gone")
            return
        if not there.ours:
            break
        time.sleep(POLL_S)
    raise TpukitError(f"{name} is still there and may cost money: {_how_to_delete(name, zone)}")


def look(cloud, name, zone):
    """The request and the machine of that name, as they are now."""
    return rented.Rented(name, zone, _part(cloud, "queued-resources", name, zone), _part(cloud, "tpu-vm", name, zone))


def _part(cloud, group, name, zone):
    try:
        return cloud.read(*cloud.tpus(group, "describe", name, zone=zone))
    except GcloudError as error:
        if error.kind == "gone":
            return None
        raise


def _delete_part(cloud, group, name, zone, *flags):
    try:
        cloud.ask(*cloud.tpus(group, "delete", name, *flags, zone=zone))
    except GcloudError as error:
        if error.kind != "gone":
            raise


class _Over(TpukitError):
    """The request ended without a machine."""


class _Request:
    """A request that this process makes, while it waits."""

    def __init__(self, cloud, name, zone):
        self.cloud, self.name, self.zone, self.mark = cloud, name, zone, secrets.token_hex(4)
        self.made = False  # gcloud said that it took it

    def words(self, accelerator, *, spot, hours, wait_hours, service_account):
        """What gcloud is to be told."""
        minutes, wait_s = max(round(hours * 60), 1), round(wait_hours * 3600)
        guard = guard_script(self.name, self.zone, self.cloud.project, minutes, patience_s=wait_s + 1800)
        labels = {rented.MARK[0]: rented.MARK[1], "tpukit-minutes": minutes, "tpukit-request": self.mark}
        labels["tpukit-capacity"] = "spot" if spot else "on-demand"
        flags = [
            f"--node-id={self.name}",
            f"--accelerator-type={accelerator}",
            f"--runtime-version={generation_of(accelerator).image}",
            f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
            f"--scopes={SCOPE}",
            f"--valid-until-duration={wait_s}s",
            f"--metadata=^~^startup-script={guard}",
            *["--spot"] * spot,
            *[f"--service-account={service_account}"] * bool(service_account),
        ]
        return self.cloud.tpus("queued-resources", "create", self.name, *flags, zone=self.zone)

    def make(self, words, patience_s):
        """Ask for it and wait until the machine is there. What fails is taken back, or the error says what may be left."""
        with _signals((signal.SIGTERM, HANG_UP), _interrupt):  # around the handlers too: what comes late must not kill them
            try:
                self.cloud.ask(*words)
                self.made = True
                self.wait(patience_s)
            except KeyboardInterrupt:
                self.withdraw("interrupted: deleting the request (this takes a moment)")
                raise
            except _Over:
                self.withdraw()
                raise
            except TpukitError as error:
                if self.made:  # it was asked for its state and did not answer
                    left = "The request stands, and may become a machine that costs"
                    raise TpukitError(f"{error}\n{left}: {_how_to_delete(self.name, self.zone)}") from error
                try:
                    self.withdraw(quiet=True)  # what it left, if anything
                except TpukitError:
                    left = "Whether a request was made all the same is not known: tpukit cloud list tells"
                    raise TpukitError(f"{error}\n{left}") from error
                raise
            except BaseException:  # what is printed here goes into a pipe that is closed, for instance
                self.withdraw(quiet=True)
                raise

    def wait(self, patience_s):
        """Until the machine is there. Raises _Over where it will not come, GcloudError where gcloud answers no more."""
        start, told, failures = time.monotonic(), ("", 0), 0
        while True:
            request = None
            try:
                request = self.cloud.read(*self.cloud.tpus("queued-resources", "describe", self.name, zone=self.zone))
                failures = 0
            except TpukitError as error:
                failures += 1
                if getattr(error, "kind", "") == "gone":
                    raise _Over(f"{self.name} is gone: somebody deleted the request") from error
                if failures == 5:
                    raise
                print(f"no answer, trying again: {getattr(error, 'said', str(error)).splitlines()[-1]}", flush=True)
            if self.cloud.dry_run:
                print("# ... again until it is ACTIVE")
                return
            minutes = (time.monotonic() - start) / 60
            state = rented.state_of(request)
            if request and told != (state, minutes // 5):
                told = (state, minutes // 5)
                print(f"{minutes:3.0f} min  {state}: {rented.REQUESTS.get(state, 'unknown to tpukit')}", flush=True)
            if state == "ACTIVE":
                return
            if state in rented.OVER:
                error = ((request.get("state") or {}).get("failedData") or {}).get("error") or {}
                words = self.cloud.tpus("queued-resources", "create", self.name, zone=self.zone)
                words.append(f"--accelerator-type={rented.Rented(self.name, self.zone, request).accelerator}")
                raise _Over(str(GcloudError(words, error.get("message") or f"the request ended as {state}, without a reason")))
            if state in rented.WAITING and minutes * 60 > patience_s:
                accelerator = rented.Rented(self.name, self.zone, request).accelerator
                raise _Over(
                    f"no free {accelerator} in {self.zone} within {patience_s / 3600:g} hours. Wait longer (--wait-hours), "
                    f"take a smaller one, --spot or without it, or another zone. {zones_of(accelerator)}"
                )
            time.sleep(POLL_S)

    def withdraw(self, why="", quiet=False):
        """Delete the request, if it is there and is this one."""
        with _signals((signal.SIGINT, signal.SIGTERM, HANG_UP), signal.SIG_IGN):
            if why:
                _tell(why)
            try:
                there = look(self.cloud, self.name, self.zone)
                if why and not self.made and not there.request and not there.node:
                    time.sleep(min(POLL_S, 5))  # what was asked for a moment ago may be on its way
                    there = look(self.cloud, self.name, self.zone)
                if not there.request and not there.node:
                    if self.made and not quiet:
                        _tell("nothing is left")
                    elif not quiet:
                        _tell(
                            f"{self.name} is not there. It may still come, because the interrupt met the request on its way: "
                            "look again in some minutes (tpukit cloud list), and delete it: "
                            f"{_how_to_delete(self.name, self.zone)}"
                        )
                elif self.made and not there.labels:
                    how = _how_to_delete(self.name, self.zone)
                    _tell(f"{self.name} in {self.zone} shows no labels and is left alone. It may cost; if it is yours: {how}")
                elif there.label("tpukit-request") != self.mark:
                    _tell(f"{self.name} in {self.zone} is not what this command asked for: it is left alone")
                else:
                    delete_checked(self.cloud, self.name, self.zone)
            except TpukitError as error:
                raise TpukitError(
                    f"{error}\nThe request may still become a machine that costs: {_how_to_delete(self.name, self.zone)}"
                ) from error


def confirm(question, yes):
    """Go on after a yes. Raises TpukitError for a no, and where nobody can be asked."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise TpukitError("nobody can be asked here, and nothing was done: say yes beforehand with --yes")
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise TpukitError("nothing was done")


def _check(zone, hours, wait_hours, service_account):
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z0-9]+", zone):
        raise TpukitError(f"zone {zone!r}: a zone is called like us-central1-a, with its last letter")
    if not 0 < hours <= 24 * 7:
        raise TpukitError(f"hours={hours:g}: more than 0, and at most {24 * 7}, a week")
    if not 0 < wait_hours <= 24 * 7:
        raise TpukitError(f"wait_hours={wait_hours:g}: more than 0, and at most {24 * 7}, a week")
    if service_account and not re.fullmatch(r"[\w.+-]+@[\w.-]+", service_account):
        raise TpukitError(f"service_account {service_account!r} is no address like NAME@PROJECT.iam.gserviceaccount.com")


def _how_to_delete(name, zone):
    return line(["compute", "tpus", "queued-resources", "delete", name, f"--zone={zone}", "--force"])


def _as_json(value):
    return json.dumps(value, indent=1)


def _tell(words):
    """Print, also where the terminal may be gone."""
    with contextlib.suppress(OSError):
        print(words, flush=True)


def _interrupt(number, frame):
    raise KeyboardInterrupt


@contextlib.contextmanager
def _signals(numbers, handler):
    """Within it, these signals are handled so; one that is ignored (nohup) stays so. In other threads this does nothing."""
    mine = threading.current_thread() is threading.main_thread()
    numbers = {number for number in numbers if mine and signal.getsignal(number) != signal.SIG_IGN}
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
