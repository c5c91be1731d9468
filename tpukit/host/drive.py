"""Mount Google Drive on Colab, after asking the user once."""

from pathlib import Path

from tpukit.host import environment

_asked: set[Path] = set()  # the Drives that this process asked for: a refusal is an answer


def mount_drive(env: environment.Environment | None = None) -> Path | None:
    """Mount Google Drive on Colab, which asks for the user's consent.

    Args:
        env: this machine; by default what `detect()` returns.

    Returns:
        The MyDrive folder, or None if there is no Drive here or it was not mounted; a printed line says
        why."""
    env = env or environment.detect()
    if env.drive is None:
        print(f"Drive: only Colab can mount it; this is {env.host}, results stay in {env.outputs}.")
        return None
    if not env.has_drive:
        _asked.add(env.drive)
        try:
            from google.colab import drive  # pyright: ignore  (only Colab has it)

            drive.mount(str(env.drive.parent))  # pyright: ignore[reportUnknownMemberType]
        except Exception as error:  # the user closed the consent window, or the account has no Drive
            print(f"Drive: not mounted ({error}). Results in {env.outputs} are lost with this session.")
            return None
    print(f"Drive: {env.drive}")
    return env.drive


def ask_for_drive(env: environment.Environment) -> bool:
    """Mount a Drive, if the user was not asked before and can answer. Returns whether it was mounted."""
    known = env.drive is None or env.has_drive or env.drive in _asked
    if known or not environment.is_interactive_notebook():
        return False
    print("Drive: the dataset may be there, so Colab asks whether to mount it")
    return mount_drive(env) is not None
