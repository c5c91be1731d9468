"""`tpukit send`: sessions on Kaggle or Colab from here, one after the other, until the training is done.

chain.py decides what follows what, follow.py does it. Both know nothing of a service but the class `Service`
of service.py; kaggle.py and colab.py are the two. session.py writes the notebook of one session, with the
library in it; inside.py is what runs there."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tpukit.host.errors import TpukitError

Ending = Literal["done", "stopped", "failed", "no accelerator", "lost", "cancelled"]


class Unreachable(TpukitError):
    """The service did not answer, or was too busy: the same again, later, may succeed."""


@dataclass
class Session:
    """One session of a chain, as chain.json has it."""

    kernel: str  # its full name there, OWNER/tpukit-NAME-3 on Kaggle
    hours: float  # its limit
    setting: int = 0  # which of the chain's settings
    source: str | None = None  # the kernel whose output it resumes
    state: Literal["intended", "sent", Ending] = "intended"
    error: str = ""  # one line
    step: int = 0  # where the run stands that it brought; 0: it brought none
    epochs: int = 0


class State(NamedTuple):
    word: str  # queued, running, complete, error, cancelled, or unknown: there is none of this name
    message: str = ""


class Quota(NamedTuple):
    left_h: float
    total_h: float
    renewed: str  # when, as the service writes it
