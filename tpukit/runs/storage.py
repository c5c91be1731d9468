"""Where copies of a run, and weights, lie: a folder, or an address such as s3://bucket/run. The only user of
fsspec."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
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
# Here a lost upload leaves what was there; elsewhere a file is uploaded under another name, then renamed.
WHOLE_OR_NOT = ("s3", "s3a", "gs", "gcs", "hf", "abfs", "az", "oci", "oss", "memory")

Check = Callable[[Path], None]  # raises Damaged for a file that is not what was written


def address_of(place: str | Path | None) -> str | None:
    """The address that a str or a Path (in which `//` is `/`) holds, or None for a path and for None.

    Raises TpukitError for what is neither, and, without showing it, for an address that may hold a password
    or a token."""
    start, colon, _ = re.split(r"[/\\]", str(place), maxsplit=1)[0].partition(":")
    if not colon or len(start) == 1:  # of a drive of Windows
        return None
    found = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.*[^/])/*", str(place), re.I | re.S)
    if not found:
        raise TpukitError(f"{start}: is the start of no address, such as s3://bucket/run; give a full path")
    scheme, rest = found[1].lower(), found[2]
    user = rest.partition("/")[0].rpartition("@")[0]
    if ":" in user or (user and scheme in ("http", "https")) or "?" in rest:
        raise TpukitError(
            f"this {scheme}:// address has a name before its @ or a query after a ?, which may hold a secret:"
            " give the address alone, and the secret in the environment or in the secrets of Colab or Kaggle"
            f" {tuple(SECRETS.get(scheme, {}).values())}"
        )
    return f"{scheme}:///{rest}" if scheme in ("file", "local") else f"{scheme}://{rest}"


def open_storage(place: str | Path) -> "Folder | Remote":
    """The storage at a path or an address."""
    address = address_of(place)
    return Remote(address) if address else Folder(place)


def check_empty(storage: "Folder | Remote") -> None:
    """Raise TpukitError if there is anything else where no run is: it could be taken for a part of a run."""
    if found := sorted(name for name in storage.names() if name and not name.startswith(".")):
        has = printable(", ".join(found[:3]))
        raise TpukitError(f"{storage} is not empty and holds no run (it has {has}): choose an empty folder")


class Folder:
    """A folder, on Drive for instance."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        # When Drive is lost, an empty folder stays where it was mounted.
        self.mount_point = next(filter(os.path.ismount, (self.path, *self.path.parents)))

    def __str__(self) -> str:
        return str(self.path)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: an error of the disk names this folder."""
        return files.explain_unwritable(self.path)

    def check(self) -> None:
        """Raise TpukitError if the disk is gone: what is written then lands in the empty mount point."""
        if not os.path.ismount(self.mount_point):
            raise TpukitError(f"nothing is mounted at {self.mount_point} any more")

    def check_before_training(self) -> None:
        """Raise TpukitError if Colab's Drive is not mounted, or the folder cannot be made and written in."""
        drive = environment.detect().drive
        if drive is not None and self.path.is_relative_to(drive.parent) and not drive.is_dir():
            raise TpukitError(f"{self} is on Drive, which is not mounted: call tpukit.mount_drive first")
        with self.explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))

    def local_copy(self, names: Iterable[str]) -> Path:
        """A folder on this machine with these files, for reading."""
        return self.path

    def names(self, folder: str = "") -> list[str]:
        return [path.name for path in (self.path / folder).glob("*")]

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def put(self, source: Path, name: str, check: Check | None = None) -> None:
        """Copy a file here, whole or not at all; a damaged one replaces nothing."""
        self.check()
        files.copy_atomic(source, self.path / name, check)
        files.remove_partials((self.path / name).parent)

    def get(self, name: str, target: Path, check: Check | None = None) -> None:
        """Copy a file from here, whole or not at all; a damaged one replaces nothing."""
        files.copy_atomic(self.path / name, target, check)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()


class Remote:
    """A folder at an address, with the methods of `Folder`."""

    def __init__(self, address: str):
        self.address, self.scheme = address, address.partition(":")[0]
        # Now, and not in a launched core, which cannot ask the page of a notebook.
        self._options = _options(self.scheme)

    def __str__(self) -> str:
        return self.address

    def _open(self) -> tuple[Any, str]:
        """(file system, path of this folder in it). fsspec keeps the connection, a fork gets its own."""
        import fsspec

        file_system, root = fsspec.url_to_fs(self.address, use_listings_cache=False, **self._options)
        return file_system, root.rstrip("/")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context manager: whatever a library raises is a TpukitError with this address and no secret."""
        try:
            yield
        except TpukitError:
            raise
        except Exception as error:  # each file system's library has its own; a chained one could show a token
            what = "needs a package" if isinstance(error, ImportError) else "cannot be reached"
            reason = printable(secrets.hide(f"{type(error).__name__}: {first_line(error)}"))
            raise TpukitError(f"{self.address} {what}: {reason}") from None

    def info(self, name: str) -> dict[str, Any] | None:
        """What the store says of a file, None if there is none. Not by `exists`, which takes a lost
        connection for a missing file."""
        with self.explained(), contextlib.suppress(FileNotFoundError):
            file_system, root = self._open()
            return file_system.info(f"{root}/{name}")

    def check(self) -> None:
        """Nothing to check: a lost connection raises when it is used."""

    def check_before_training(self) -> None:
        """Raise TpukitError if the address cannot be reached, or its package is missing."""
        self.names()

    def local_copy(self, names: Iterable[str]) -> Path:
        self._copied = tempfile.TemporaryDirectory(prefix="tpukit-")  # removed with this object
        for name in filter(self.has, names):
            self.get(name, Path(self._copied.name) / name)
        return Path(self._copied.name)

    def names(self, folder: str = "") -> list[str]:
        with self.explained(), contextlib.suppress(FileNotFoundError):
            file_system, root = self._open()
            paths = file_system.ls(f"{root}/{folder}".rstrip("/"), detail=False)
            return [path.rstrip("/").rpartition("/")[2] for path in paths]
        return []

    def has(self, name: str) -> bool:
        return self.info(name) is not None

    def put(self, source: Path, name: str, check: Check | None = None) -> None:
        if check is not None:
            check(source)
        least = source.stat().st_size  # records and log may grow meanwhile
        with self.explained():
            file_system, root = self._open()
            path = f"{root}/{name}"
            target = path if self.scheme in WHOLE_OR_NOT else f"{path}.partial"
            if target != path:
                file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
            file_system.put_file(str(source), target)
            if file_system.info(target)["size"] < least:
                raise OSError(f"{name} arrived incomplete")
            if target != path:
                file_system.mv(target, path)

    def get(self, name: str, target: Path, check: Check | None = None, **options: Any) -> None:
        """As of a `Folder`. options: of fsspec's `get_file`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if (about := self.info(name)) is None:
            raise Damaged(f"there is no {self}/{name}")
        with files.atomic_file(target, check=check) as file:
            with self.explained():
                file_system, root = self._open()
                file_system.get_file(f"{root}/{name}", file.name, **options)
            size = os.stat(file.name).st_size
            if about["size"] not in (None, size):
                raise TpukitError(f"{self}/{name} arrived incomplete ({size} of {about['size']} bytes)")

    def remove(self, name: str) -> None:
        with self.explained():
            file_system, root = self._open()
            file_system.rm_file(f"{root}/{name}")


def _options(scheme: str) -> dict[str, Any]:
    """Options of a file system, by which fsspec also tells one connection from another."""
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


# Weights


def local(path: str | Path) -> Path:
    """The file of a path, or of an address (s3://, gs://, hf://), which is downloaded once."""
    address = address_of(path)
    return fetch(address) if address else Path(path)


def fetch(address: str) -> Path:
    """The file at an address as a file in the cache folder, downloaded once for every version of it.

    Raises TpukitError if it cannot be reached, does not fit, or arrives incomplete or changed, by its size
    and by the SHA-256 that a store gives."""
    from fsspec.callbacks import TqdmCallback

    folder, _, name = address.rpartition("/")
    remote = Remote(folder)
    if (about := remote.info(name)) is None:
        raise TpukitError(f"weights {address}: no such file")
    size, lfs = about.get("size"), about.get("lfs") or {}
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    version = [about.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime")]
    key = hashlib.sha256(json.dumps([address, size, sha256, version], default=str).encode()).hexdigest()
    target = files.cache_folder() / "weights" / f"{key[:16]}-{Path(printable(name)).name}"
    with files.explain_unwritable(files.cache_folder()):
        files.make_private(files.cache_folder())  # before anything in it is believed
        target.parent.mkdir(exist_ok=True)

    def is_whole(path: Path) -> bool:
        return path.stat().st_size == size and sha256 in (None, files.sha256(path))

    def check(path: Path) -> None:
        if not is_whole(path):
            raise Damaged(f"{address} arrived incomplete or changed: try again")

    with files.file_lock(target):
        if target.is_file() and is_whole(target):
            return target
        files.remove_partials(target.parent)
        free = shutil.disk_usage(target.parent).free
        if not size or size > free:
            raise TpukitError(f"{address} has {size} bytes, and {target.parent} has {free} free")
        print(printable(f"weights: downloading {address} ({size / 1e6:.0f} MB)"))
        with TqdmCallback(tqdm_kwargs=dict(unit="B", unit_scale=True, desc=name)) as bar:
            remote.get(name, target, check, callback=bar)
    return target
