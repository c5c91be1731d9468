"""The copy of a run in another place, such as Drive: kept up to date, and restored from. Also runs in Kaggle's inputs."""

import glob

from tpukit.host import files
from tpukit.host.datasets import is_run
from tpukit.host.errors import TpukitError
from tpukit.host.tables import printable
from tpukit.runs import checkpoints

COPIED = ("config.json", "log.txt", "records.jsonl", "best.safetensors")  # and the checkpoints


class Backup:
    """A copy of the run, updated at every checkpoint. place: the `Folder` or `Remote` of it. open_run: path -> `Run`."""

    def __init__(self, place, open_run):
        self.place, self.open_run = place, open_run
        self.failed = False
        self.copied = {}  # file name -> the version of the run's file that was copied last

    def __str__(self):
        return str(self.place)

    def update(self, run):
        """Copy what changed. A failure is reported once and ends no training: Drive may be full or gone."""
        try:
            self._update(run)
        except (OSError, TpukitError) as error:
            self.copied.clear()
            if not self.failed:
                run.print(f"backup to {self} failed ({error}); the training continues, checkpoints stay in {run.path}")
            self.failed = True
        else:
            if self.failed:
                run.print(f"backup to {self} works again")
            self.failed = False

    def _update(self, run):
        """Each file is copied whole or not at all, the list of checkpoints last."""
        self.check_run(run, run.config["id"])
        kept = run.checkpoints()
        for name in (*COPIED, *(f"checkpoints/{entry['file']}" for entry in kept)):
            if not (run.path / name).exists():
                continue
            about = (run.path / name).stat()
            version = about.st_ino, about.st_mtime_ns, about.st_size
            if self.copied.get(name) != version or not self.place.has(name):
                self.place.put(run.path / name, name)
                self.copied[name] = version
        self.place.put_list(kept)

    def check_run(self, run, run_id):
        """Raise TpukitError where a run of this id cannot be backed up here: the disk is gone, or the folder holds another run,
        other files, or a later state of this run, which another session left."""
        self.place.check()
        copy = self.place.open_copy(self.open_run)
        if not self.place.has("config.json"):
            self.place.check_empty(copy)
            return
        copy.check_links()
        found = copy.config.get("id")
        if found != run_id:
            raise TpukitError(
                f"the backup {self} belongs to another run than {run.path} (id {found}, not {run_id}): choose another backup "
                "folder, or, to resume the run that was backed up, a run folder that does not exist yet"
            )
        here, there = (max((entry["step"] for entry in one.checkpoints()), default=0) for one in (run, copy))
        if there > here:
            raise TpukitError(
                f"the backup {self} has step {there} of this run, but {run.path} has only step {here}: choose another backup "
                "folder, or, to resume from the backup, a run folder that does not exist yet"
            )


def restore_from_backup(run, place, task, open_run):
    """Restore a run of this task from its copy at a place, and nothing else that lies there."""
    unfinished = run.path / ".restoring"  # exists only if a kill cut this short
    if not unfinished.exists():
        run.check_empty()
    copy = place.open_copy(open_run)
    copy.check_links()
    run.check_links()
    copy.check_settings(task)
    print(printable(f"run: restoring {run.path} from {place}"))
    names = [f"checkpoints/{entry['file']}" for entry in copy.checkpoints()]
    # config.json last: it is what makes the folder a run.
    names += [f"checkpoints/{checkpoints.LIST}", *reversed(COPIED)]
    with files.explain_unwritable(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
    for name in names:
        if place.has(name):
            place.get(name, run.path / name)
    unfinished.unlink()


def find_run(env, name):
    """The folder of the run `name` below the Kaggle inputs (the output of an earlier version of the notebook, or a copy), for
    `Run.open(..., earlier=...)`; None where there is none, or the outputs already hold the run. Raises TpukitError for several.
    """
    if env.inputs is None or not name or (env.outputs / name / "config.json").is_file():
        return None
    patterns = [f"{'*/' * depth}{glob.escape(name)}" for depth in range(5)]  # the deepest: notebooks/OWNER/NOTEBOOK/outputs/
    found = [place for pattern in patterns for place in sorted(env.inputs.glob(pattern)) if is_run(place)]
    if len(found) > 1:
        raise TpukitError(f"{len(found)} inputs hold a run named {name}: {', '.join(map(str, found))}. Remove all but one")
    return found[0] if found else None
