"""The one place where tpukit calls gcloud, and what gcloud's refusals mean."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys

from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.tools.cloud.tpu_types import zones_of

GIVE_UP_S = 120  # how long an interrupted command may take to end by itself
ROLES = "roles/tpu.admin, and roles/iam.serviceAccountUser for the machine's service account"
# What gcloud says -> (kind, what to do). The first that is found counts. {flags} come from the command that was refused.
MENDS = [
    (
        "gone",  # the resource, not its project or zone
        r"NOT_FOUND(?!: (Resource 'projects/[^/']+(/locations/[^/']+)?'|Project |Location ))",
        "it is not there (any more); tpukit cloud list shows what is",
    ),
    (
        "login",
        r"gcloud auth login|no.{0,20} active account|Reauthentication|invalid_grant|UNAUTHENTICATED",
        "log in: gcloud auth login",
    ),
    (
        "api",
        r"has not been used in project|SERVICE_DISABLED|API.{0,60}(is disabled|not enabled)",
        "switch the Cloud TPU API on: gcloud services enable tpu.googleapis.com --project={project}",
    ),
    ("billing", r"[Bb]illing", "the project needs a billing account: https://console.cloud.google.com/billing"),
    (
        "wrong zone",
        r"not found in zone|zonal accelerator configurations|Permission denied on 'locations/|LOCATION_POLICY_VIOLATED|"
        r"not supported.{0,40}in location|[Ii]nvalid location|Location \S+ is not found|"
        r"Resource 'projects/[^/']+/locations/[^/']+' was not found",
        "{zone} has no {accelerator} for this project. {zones}",
    ),
    (
        "project",
        r"CONSUMER_INVALID|\b[Pp]roject\b.{0,60}(not found|is not valid|has been deleted)|Resource 'projects/[^/']+' was",
        "choose a project that exists (gcloud projects list): --project, or gcloud config set project PROJECT",
    ),
    (
        "quota",
        r"[Qq]uota.{0,80}([Ll]imit|exceeded|exhausted)|QUOTA",
        "this project may not hold so many chips of that kind in {zone}. Ask for more at "
        "https://console.cloud.google.com/iam-admin/quotas (Cloud TPU API, the limit that is named above). Spot capacity has a "
        "limit of its own (--spot), and so has every zone. {zones}",
    ),
    (
        "no capacity",
        r"no more capacity|[Ii]nsufficient.{0,20}capacity|STOCKOUT|stockout|RESOURCE_POOL_EXHAUSTED|RESOURCE_EXHAUSTED",
        "all chips of that kind in {zone} are taken now. Try again later or with a longer --wait-hours, a smaller slice, "
        "--spot or without it, or another zone. {zones}",
    ),
    (
        "permission",
        r"PERMISSION_DENIED|does not have permission|[Pp]ermission .{0,60}denied|Required .{0,60}permission",
        f"your account needs {ROLES}; who owns {{project}} can grant them. Other account: gcloud auth login",
    ),
    ("taken", r"ALREADY_EXISTS|already exists", "the name is taken in {zone}: take another, or look at tpukit cloud list"),
    (
        "ssh key",
        r"ssh-add",
        "several hosts are reached with a key that the ssh agent holds: run the ssh-add line above, then again",
    ),
    (
        "ssh",
        r"exited with return code \[255\]|port 22\b",
        "the machine is not reached over ssh: it may still start, or have been taken away (tpukit cloud list); or no firewall "
        "rule of its network lets port 22 in",
    ),
    (
        "network",
        r"resolve host|Name or service not known|[Nn]etwork is unreachable|Connection (aborted|reset|refused|closed)|"
        r"[Tt]imed out|UNAVAILABLE|\b503\b",
        "the network, or Google's end: try again",
    ),
]


class GcloudError(TpukitError):
    """gcloud refused. kind: what it is about, a name of MENDS, or "". shown: the user has read already what it said."""

    def __init__(self, words, said, shown=False):
        said = "\n".join(said.strip().splitlines()[-12:]) or "(no word)"
        self.said = said
        self.kind, fix = next(((kind, fix) for kind, pattern, fix in MENDS if re.search(pattern, said)), ("", ""))
        flags = dict(word[2:].split("=", 1) for word in words if re.match(r"--[a-z-]+=", word))
        accelerator = flags.get("accelerator-type", "such type")
        filled = dict(project=flags.get("project", "PROJECT"), zone=flags.get("zone", "that zone"), accelerator=accelerator)
        fix = fix.format(zones=zones_of(accelerator), **filled)
        quoted = [f"  {text}" for text in said.splitlines()[-3 if shown else 0 :]]
        lines = [f"gcloud failed: {line(words, short=True)}", *quoted]
        super().__init__("\n".join(lines + [fix] * bool(fix)))


class Gcloud:
    """Calls gcloud for one project. With dry_run it prints every command as one would type it, and runs none.

    project: the one of gcloud's configuration unless given. Raises TpukitError where gcloud, a login or a project is missing.
    """

    def __init__(self, project="", dry_run=False):
        self.dry_run = dry_run
        if project and not re.fullmatch(r"[a-z0-9][a-z0-9.:-]*", project):
            raise TpukitError(f"project {project!r} is no project id: small letters, digits and hyphens (gcloud projects list)")
        settings = self.read("config", "list", instead={}) or {}
        core = settings.get("core", {})
        logged_in = core.get("account") or settings.get("auth")  # a token or a key file can stand for an account
        if not dry_run and not logged_in:
            raise TpukitError("gcloud is not logged in: gcloud auth login")
        if not dry_run and not project and not core.get("project"):
            raise TpukitError("gcloud has no project: gcloud config set project PROJECT (gcloud projects list shows yours)")
        self.project = project or core.get("project", "PROJECT")
        if dry_run and not project:
            print("# PROJECT is yours: what `gcloud config get project` says")

    def tpus(self, group, verb, name="", *flags, zone):
        """The words of a command about TPUs: group is queued-resources or tpu-vm."""
        return ["compute", "tpus", group, verb, *[name] * bool(name), f"--zone={zone}", f"--project={self.project}", *flags]

    def read(self, *words, instead=None):
        """What a command answers, from JSON; `instead` in a dry run."""
        if self.dry_run:
            self._print([*words, "--format=json"])
            return instead
        said = _call([*words, "--format=json"])
        try:
            return json.loads(said or "null")
        except ValueError as error:
            raise TpukitError(
                f"gcloud was asked for JSON and said something else: {said[:300]!r}; is it up to date?"
            ) from error

    def ask(self, *words, instead=""):
        """What a command prints; `instead` in a dry run."""
        if self.dry_run:
            self._print([*words, "--quiet"])
            return instead
        return _call([*words, "--quiet"], patience_s=GIVE_UP_S)

    def show(self, *words):
        """Run a command that takes a while, and print what it says as it comes."""
        self._print([*words, "--quiet"]) if self.dry_run else _call([*words, "--quiet"], echo=True)

    def hand_over(self, *words):
        """Run a command with this terminal as its own."""
        self._print(words) if self.dry_run else _call(words, terminal=True)

    def _print(self, words):
        print(line(words))


def line(words, short=False):
    """A gcloud command as one types it; short: without the values of long options."""
    if short:
        words = [word if len(word) < 60 else f"{word[:40].splitlines()[0]}..." for word in words]
    return shlex.join(["gcloud", *words])


def _call(words, *, echo=False, terminal=False, patience_s=0):
    """Run gcloud and return what it printed. Everything that tpukit wants of gcloud comes through here.

    echo: print both streams as they come. terminal: leave both, and the keyboard, to gcloud. It runs out of reach of Ctrl-C:
    patience_s is what it gets to end by itself after an interrupt, because of a half done creation nobody knows what was made.
    """
    program = shutil.which("gcloud")
    if not program:
        raise TpukitError("gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud auth login")
    if terminal:
        code = subprocess.run([program, *words]).returncode
        if code:
            raise TpukitError(f"gcloud ended with code {code}: {line(words, short=True)}")
        return ""
    streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if echo else subprocess.PIPE)
    process = subprocess.Popen([program, *words], **streams, text=True, errors="replace", start_new_session=True)
    try:
        said = []
        if echo:
            for text in process.stdout:
                print(printable(text), end="", flush=True)
                said.append(text)
            out, trouble = "", "".join(said)
            process.wait()
        else:
            out, trouble = process.communicate()
    except KeyboardInterrupt:
        _end(process, patience_s)
        raise
    if process.returncode:
        raise GcloudError(words, trouble or out, shown=echo)
    if not echo and "WARNING" in trouble:  # that a zone did not answer, for instance
        with contextlib.suppress(OSError):  # nobody may read it any more; what was asked for was done
            print(printable(trouble.strip()), file=sys.stderr)
    return out


def _end(process, patience_s):
    """Wait until an interrupted command has ended, or end it."""
    try:
        if patience_s:
            process.communicate(timeout=patience_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    process.terminate()
    process.wait()
