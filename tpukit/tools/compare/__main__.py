"""A fresh process that measures one batch size: the request comes on stdin, the answer goes into the given folder."""

import signal
import sys
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.tools.compare.measuring import ERROR_PREFIX, answer

try:
    answer(Path(sys.argv[1]))
except TpukitError as error:
    sys.exit(f"{ERROR_PREFIX}{error}")
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)
