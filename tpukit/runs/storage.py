"""Where copies of a run lie: a folder, or an address such as s3://bucket/run. The only user of fsspec."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tpukit.host import environment, files, secrets
from tpukit.host.errors import Damaged, TpukitError, first_line
from tpukit.host.tables import printable

# Options of a file system that are secrets, by scheme: option -> name of the secret. Without that secret, a
# library looks where it always does (a file of the cloud's own tools, the machine's role).
SECRETS = {
    "s3": dict(key="AWS_ACCESS_KEY_ID", secret="AWS_SECRET_ACCESS_KEY", token="AWS_SESSION_TOKEN"),
    "hf": dict(token="HF_TOKEN"),
    "gs": dict(token="GOOGLE_APPLICATION_CREDENTIALS"),
}
# A lost connection is an error within a minute, not a hang.
S3_TIMEOUTS = dict(config_kwargs=dict(connect_timeout=10, read_timeout=30, retries=dict(max_attempts=2)))
SCHEMES = ("s3", "gs", "hf", "az", "memory")  # where a lost upload leaves what was there

Check = Callable[[Path], None]  # raises Damaged for a file that is not what was written


def address_of(place: str | Path) -> str | None:
    """The address that a str or a Path (in which `//` is `/`) holds, or None for a path.

    Raises TpukitError for what is neither, and, without showing it, for an address that may hold a password
    or a token."""
    start, colon, _ = re.split(r"[/\\]", str(place), maxsplit=1)[0].partition(":")
    if not colon or len(start) == 1:  # of a drive of Windows
        return None
    found = re.fullmatch(rf"({'|'.join(SCHEMES)}):/+(.*[^/])/*", str(place), re.I | re.S)
    if not found:
        raise TpukitError(f"{start}: is the start of no address, such as s3://bucket/run; give a full path")
    scheme, rest = found[1].lower(), found[2]
    if ":" in rest.partition("/")[0].rpartition("@")[0] or "?" in rest:
        raise TpukitError(
            f"this {scheme}:// address has a password before its @, or a query, which may hold a secret: give"
            " the address alone, and the secret in the environment or in the secrets of Colab or Kaggle"
            f" {tuple(SECRETS.get(scheme, {}).values())}"
        )
    return f"{scheme}://{rest}"


class Storage:
    """A folder, on Drive for instance, or one at an address."""

    def __init__(self, place: str | Path):
        self.address = address_of(place)
        self.path = Path(place).resolve()  # means nothing for an address
        # When Drive is lost, an empty folder stays where it was mounted.
        self.mount_point = next(filter(os.path.ismount, (self.path, *self.path.parents)))
        # Now, and not in a launched core, which cannot ask the page of a notebook.
        self.options = _options(self.address) if self.address else {}

    def __str__(self) -> str:
        return self.address or str(self.path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Context manager with (file system, path of this folder in it). fsspec keeps a connection, a fork
        gets its own. Whatever a library raises is a TpukitError that names this folder, and no secret."""
        try:
            import fsspec

            if self.address is None:
                yield fsspec.filesystem("file"), str(self.path)
            else:
                file_system, root = fsspec.url_to_fs(self.address, use_listings_cache=False, **self.options)
                yield file_system, root.rstrip("/")
        except TpukitError:
            raise
        except Exception as error:  # each file system's library has its own; a chained one could show a token
            what = "needs a package" if isinstance(error, ImportError) else "cannot be reached"
            reason = printable(secrets.hide(f"{type(error).__name__}: {first_line(error)}"))
            raise TpukitError(f"{self} {what}: {reason}") from None

    def check_mounted(self) -> None:
        """Raise TpukitError if the disk is gone: what is written then lands in the empty mount point."""
        if not os.path.ismount(self.mount_point):
            raise TpukitError(f"nothing is mounted at {self.mount_point} any more")

    def check_before_training(self) -> None:
        """Raise TpukitError if no copies can be kept here: Drive is not mounted, an address not reached."""
        if self.address:
            self.names()
            return
        drive = environment.detect().drive
        if drive is not None and self.path.is_relative_to(drive.parent) and not drive.is_dir():
            raise TpukitError(f"{self} is on Drive, which is not mounted: call tpukit.mount_drive first")
        with files.explain_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()

    def check_empty(self) -> None:
        """Raise TpukitError for files where no run is: they could be taken for a part of a run."""
        if found := sorted(name for name in self.names() if name and not name.startswith(".")):
            has = printable(", ".join(found[:3]))
            raise TpukitError(f"{self} is not empty and holds no run (it has {has}): choose an empty folder")

    def info(self, name: str) -> dict[str, Any] | None:
        """What the file system says of a file, None if there is none. Not by `exists`, which takes a lost
        connection for a missing file."""
        with self._opened() as (file_system, root), contextlib.suppress(FileNotFoundError):
            return file_system.info(f"{root}/{name}")

    def has(self, name: str) -> bool:
        return self.info(name) is not None

    def names(self, folder: str = "") -> list[str]:
        with self._opened() as (file_system, root), contextlib.suppress(FileNotFoundError):
            paths = file_system.ls(f"{root}/{folder}".rstrip("/"), detail=False)
            return [path.rstrip("/").rpartition("/")[2] for path in paths]
        return []

    def get(self, name: str, target: Path, check: Check | None = None) -> None:
        """Copy a file from here, whole or not at all. Raises Damaged if it is damaged or missing."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if (info := self.info(name)) is None:
            raise Damaged(f"there is no {self}/{name}")
        with files.atomic_file(target, check=check) as file:
            with self._opened() as (file_system, root):
                file_system.get_file(f"{root}/{name}", file.name)
            size = os.stat(file.name).st_size
            if info["size"] not in (None, size):
                raise TpukitError(f"{self}/{name} arrived incomplete ({size} of {info['size']} bytes)")

    def local_copy(self, names: Iterable[str]) -> Path:
        """A folder on this machine with these files, if they are here, for reading."""
        if self.address is None:
            return self.path
        self._copied = tempfile.TemporaryDirectory(prefix="tpukit-")  # removed with this object
        for name in filter(self.has, names):
            self.get(name, Path(self._copied.name) / name)
        return Path(self._copied.name)

    def put(self, source: Path, name: str, check: Check | None = None) -> None:
        """Copy a file here, whole or not at all. Raises Damaged if `check` finds that it arrived damaged in
        a folder; an address is not read back."""
        with self._opened() as (file_system, root):
            if self.address is None:
                self.check_mounted()
                files.copy_atomic(source, self.path / name, check)
                files.remove_partials((self.path / name).parent)
                return
            least = source.stat().st_size  # records and log may grow meanwhile
            file_system.put_file(str(source), f"{root}/{name}")
            if file_system.info(f"{root}/{name}")["size"] < least:
                raise OSError(f"{name} arrived incomplete")

    def remove(self, name: str) -> None:
        with self._opened() as (file_system, root):
            file_system.rm_file(f"{root}/{name}")


def _options(address: str) -> dict[str, Any]:
    """Options of a file system, by which fsspec also tells one connection from another."""
    scheme = address.partition(":")[0]
    found = {option: secrets.find(name) for option, name in SECRETS.get(scheme, {}).items()}
    options: dict[str, Any] = {option: value for option, value in found.items() if value}
    if scheme == "s3":
        options |= dict(S3_TIMEOUTS, endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
    if str(options.get("token")).lstrip().startswith("{"):  # of Google: the content of the file, not its path
        try:
            options["token"] = json.loads(options["token"])
        except ValueError:
            raise TpukitError(f"{SECRETS[scheme]['token']} is only a part of a key file: paste all") from None
    return options
